"""The base of every schema."""

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Immutable; unknown fields are refused, so that a typo in a config is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
