"""The base of every schema."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

UnitInterval = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share, above nothing."""


class Frozen(BaseModel):
    """Immutable; unknown fields are refused, so that a typo in a config is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
