"""The base of every schema."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field

UnitInterval = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share, above nothing."""


class Frozen(BaseModel):
    """Immutable; unknown fields are refused, so that a typo in a config is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Model = TypeVar("Model", bound=BaseModel)


def with_absolute_paths(model: Model) -> Model:
    """Model with absolute paths, as processes on other nodes have another working directory."""
    return model.model_copy(update={name: _absolute(value) for name, value in model})


def _absolute(value: Any) -> Any:
    if isinstance(value, Path):
        return value.absolute()
    if isinstance(value, BaseModel):
        return with_absolute_paths(value)
    if isinstance(value, tuple):
        return tuple(_absolute(one) for one in value)
    return value
