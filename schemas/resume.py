"""Settings that may change when a run is resumed, and settings that may not.

Every setting declares this with its type: `Kept[...]`, `Free[...]` or `Rounding[...]`. A section's
declaration holds for all its settings that have none.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import BaseModel, JsonValue
from pydantic_core import to_jsonable_python

from refrain.schemas.base import Frozen

T = TypeVar("T")


class OnResume(StrEnum):
    KEPT = "kept"
    """May not change: it decides on tokens or on the order of data."""
    FREE = "free"
    """May change, for example timeouts, memory, engines and directories."""
    ROUNDING = "rounding"
    """May change, but the trainer then adds up in another order: weights differ by rounding."""


Kept = Annotated[T, OnResume.KEPT]
Free = Annotated[T, OnResume.FREE]
Rounding = Annotated[T, OnResume.ROUNDING]


class MarkedSetting(NamedTuple):
    """A setting's value, and whether it may change."""

    value: Any
    on_resume: OnResume | None
    """None: not declared."""


class SettingChange(Frozen):
    """A setting that has changed."""

    name: str
    """Dotted, as in a config."""
    before: JsonValue
    after: JsonValue
    on_resume: OnResume
    at_s: float = 0.0
    """Unix time of the resume that changed it."""

    def __str__(self) -> str:
        note = ", weights differ by rounding from here on" * (self.on_resume is OnResume.ROUNDING)
        return f"{self.name}: {self.before!r} -> {self.after!r}{note}"


class Crash(Frozen):
    """A crash after which the run continued from its last checkpoint."""

    at_s: float
    """Unix time."""
    step: int
    """Last finished step."""
    error: str

    def __str__(self) -> str:
        return f"after step {self.step}: {self.error.splitlines()[0]}"


def settings_of(config: BaseModel) -> dict[str, MarkedSetting]:
    """Return every setting by its dotted name."""
    return dict(_settings(config, "", None))


def changed_settings(before: BaseModel, after: BaseModel) -> list[SettingChange]:
    """Return the settings of `after` that differ from those of `before`, by name."""
    old, new = settings_of(before), settings_of(after)
    absent = MarkedSetting(None, None)
    changes = []
    for name in sorted(old.keys() | new.keys()):
        one, other = old.get(name, absent), new.get(name, absent)
        if one.value != other.value:
            said = one.on_resume or other.on_resume
            assert said, f"{name} does not say whether it may change"
            values = (to_jsonable_python(setting.value) for setting in (one, other))
            changes.append(_change(name, *values, said))
    return changes


def _change(name: str, before: JsonValue, after: JsonValue, on_resume: OnResume) -> SettingChange:
    return SettingChange(name=name, before=before, after=after, on_resume=on_resume)


def _settings(
    config: BaseModel, prefix: str, section: OnResume | None
) -> Iterator[tuple[str, MarkedSetting]]:
    for name, field in type(config).model_fields.items():
        own = next((said for said in field.metadata if isinstance(said, OnResume)), section)
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            yield from _settings(value, f"{prefix}{name}.", own)
        else:
            yield prefix + name, MarkedSetting(value, own)
