"""The base of every schema."""

import math
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Secret, SecretStr

UnitInterval = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share, above nothing."""


class Frozen(BaseModel):
    """Immutable; unknown fields are refused, so that a typo in a config is an error. As JSON, a
    float that is not finite is a string (`"NaN"`), which is read again as that float."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="strings"
    )


MAX_INT = 2**63 - 1
"""Largest whole number that tables and other languages hold."""


def refuse_unusable(value: Any, name: str = "") -> None:
    """Raises ValueError for values that no setting can mean, and that could not be written
    down as JSON: a number that is not finite or beyond 64 bits, a text with a zero byte or with
    half of a surrogate pair. `name`: of the setting, dotted."""
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
            raise ValueError(f"{name} is {str(value)!r}, which is no text: mend it")
        case SecretStr() | Secret() if _is_torn(value.get_secret_value()):
            raise ValueError(f"{name} is no text: mend it")


def _is_torn(text: str) -> bool:
    return any(one == "\0" or "\ud800" <= one <= "\udfff" for one in text)


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
