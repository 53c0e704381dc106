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


def with_absolute_paths(model: Model, working_dir: Path | None = None) -> Model:
    """Model with absolute paths, for processes with another working directory than this one, or
    than the one that is given."""
    base = working_dir or Path.cwd()
    return model.model_copy(update={name: _absolute(value, base) for name, value in model})


def _absolute(value: Any, base: Path) -> Any:
    if isinstance(value, Path):
        return base / value
    if isinstance(value, BaseModel):
        return with_absolute_paths(value, base)
    if isinstance(value, tuple):
        return tuple(_absolute(one, base) for one in value)
    return value
