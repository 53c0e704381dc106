"""Settings as config classes declare them: names, values, defaults and descriptions."""

from collections.abc import Iterator, Sequence
from copy import copy
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from refrain.schemas.resume import OnResume

_CLOSE = 0.8
"""Similarity from which a name counts as misspelt, out of 1."""
_BOUNDS = {
    annotated_types.Gt: (">", "gt"),
    annotated_types.Ge: (">=", "ge"),
    annotated_types.Lt: ("<", "lt"),
    annotated_types.Le: ("<=", "le"),
    annotated_types.MinLen: ("length >=", "min_length"),
    annotated_types.MaxLen: ("length <=", "max_length"),
}


class DeclaredSetting(NamedTuple):
    """A setting or a section."""

    name: str
    """Dotted, as in a config."""
    field: FieldInfo
    is_section: bool
    on_resume: OnResume | None
    """Whether it may change when a run is resumed. None: not declared."""


def declared_settings(
    kind: type[BaseModel], prefix: str = "", on_resume: OnResume | None = None
) -> Iterator[DeclaredSetting]:
    """Yield all settings of a config in order, each section before its settings. If a section may
    have several classes, the settings of all of them follow, each name once."""
    for name, field in kind.model_fields.items():
        said = [one for one in _metadata(field) if isinstance(one, OnResume)]
        own = said[0] if said else on_resume
        sections = list(_sections(field.annotation))
        yield DeclaredSetting(prefix + name, field, bool(sections), own)
        found: dict[str, DeclaredSetting] = {}
        for section in sections:
            for inner in declared_settings(section, f"{prefix}{name}.", own):
                first = found.get(inner.name)
                found[inner.name] = _both(first, inner) if first else inner
        yield from found.values()


def _both(one: DeclaredSetting, other: DeclaredSetting) -> DeclaredSetting:
    """Return a setting of two classes of a section, with the values that either class accepts."""
    if one.field.annotation == other.field.annotation:
        return one
    field = copy(one.field)
    field.annotation = Union[one.field.annotation, other.field.annotation]  # noqa: UP007  # ty: ignore[invalid-type-form]
    return one._replace(field=field)


def meant_by(name: str, kind: type[BaseModel]) -> str | None:
    """Return the setting that an unknown name probably means: a misspelt one, or one of another
    section."""
    section, _, last = name.rpartition(".")
    names = [setting.name for setting in declared_settings(kind)]
    own = [one for one in names if one.rpartition(".")[0] == section]
    return _like(last, own) or _like(last, names)


def _like(last: str, names: Sequence[str]) -> str | None:
    """Return the name whose last part is most similar: nearly the same, or with `last` as one of
    its words."""
    by_last = {one.rpartition(".")[2]: one for one in reversed(names)}
    close = get_close_matches(last, by_last, 1, _CLOSE)
    longer = [one for one in by_last if f"_{one}_".find(f"_{last}_") >= 0]
    found = [*longer[-1:], *close]
    return by_last[found[0]] if found else None


def described_values(field: FieldInfo) -> str:
    """Return the values that a setting accepts, with bounds, for people: `int >= 1`."""
    bounds = (_bound(one) for one in _metadata(field))
    return " ".join([_values(field.annotation), *filter(None, bounds)])


def described_default(field: FieldInfo) -> str:
    """Return the default of a setting as in a config. Empty if the setting is required."""
    if field.default is PydanticUndefined:
        return ""
    value = field.default
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Annotated, Union, UnionType):
        for part in get_args(annotation):
            yield from _sections(part)


def _metadata(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    for part in get_args(field.annotation):
        yield from getattr(part, "__metadata__", ())


def _bound(constraint: Any) -> str | None:
    found = _BOUNDS.get(type(constraint))
    return f"{found[0]} {getattr(constraint, found[1]):g}" if found else None


def _values(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _values(parts[0])
    if origin in (Union, UnionType):
        separator = ", " if all(get_origin(part) is Literal for part in parts) else " or "
        return separator.join("none" if part is type(None) else _values(part) for part in parts)
    if origin is Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin is tuple:
        return f"list of {_values(parts[0])}"
    if origin is dict:
        return f"{_values(parts[0])}: {_values(parts[1])}"
    names = {"Path": "path", "SecretStr": "text", "str": "text", "bool": "true, false"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, name)
