"""The base class of every schema."""

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Secret, SecretStr

UnitInterval = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share above 0 and up to 1."""


class Frozen(BaseModel):
    """Immutable. Unknown fields are refused, so a typo in a config is an error. In JSON a float
    that is not finite is a string (`"NaN"`), which is read back as that float."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings"
    )


MAX_INT = 2**63 - 1
"""Largest whole number that tables and other languages can store."""


def refuse_unusable(value: Any, name: str = "") -> None:
    """Raise ValueError for a value that no setting can have and JSON cannot store: a number that is
    not finite or beyond 64 bits, or text with a zero byte or half of a surrogate pair. `name`:
    dotted name of the setting."""
    match value:
        case dict():
            for key, inner in value.items():
                refuse_unusable(inner, f"{name}.{key}".removeprefix("."))
        case list() | tuple():
            for inner in value:
                refuse_unusable(inner, name)
        case float() if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: give a finite number")
        case int() if abs(value) > MAX_INT:
            raise ValueError(f"{name} is beyond 64 bits: give a smaller number")
        case str() | Path() if _is_torn(str(value)):
            raise ValueError(f"{name} is {str(value)!r}, which is not valid text: correct it")
        case SecretStr() | Secret() if _is_torn(value.get_secret_value()):
            raise ValueError(f"{name} is not valid text: correct it")


def _is_torn(text: str) -> bool:
    return any(one == "\0" or "\ud800" <= one <= "\udfff" for one in text)


Model = TypeVar("Model", bound=BaseModel)


def with_absolute_paths(model: Model, working_dir: Path | None = None) -> Model:
    """Return the model with absolute paths, for processes with another working directory. Paths are
    relative to `working_dir`, by default this process's."""
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
