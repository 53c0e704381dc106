"""Values of a data set as JSON, for a worker process.

Types of Parquet that JSON lacks become objects with a type name. Workers import this module: see
`importing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

TYPE, VALUE = "refrain.type", "refrain.value"


def to_json(value: Any) -> Any:
    """Convert a value to JSON. `from_json` reverses this. Raises ValueError for other types."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, list):
        return [to_json(one) for one in value]
    if isinstance(value, dict):
        plain = {name: to_json(one) for name, one in value.items()}
        return {TYPE: "dict", VALUE: list(plain.items())} if TYPE in plain else plain
    for name, (kind, encode, _) in TYPES.items():
        if isinstance(value, kind):
            return {TYPE: name, VALUE: encode(value)}
    if hasattr(value, "tolist"):
        return to_json(value.tolist())  # NumPy's.
    kind_name = type(value).__name__
    raise ValueError(f"your code cannot receive a {kind_name}: remove it from the rows")


def from_json(value: dict[str, Any]) -> Any:
    """Restore a value that `to_json` converted. Object hook of `json.loads`."""
    if TYPE not in value:
        return value
    _, _, decode = TYPES[value[TYPE]]
    return decode(value[VALUE])


TYPES: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dict": (dict, dict.items, dict),
    "tuple": (tuple, lambda values: [to_json(one) for one in values], tuple),
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "decimal": (Decimal, str, Decimal),
    "datetime": (datetime, datetime.isoformat, datetime.fromisoformat),
    "date": (date, date.isoformat, date.fromisoformat),
    "time": (time, time.isoformat, time.fromisoformat),
    "timedelta": (
        timedelta,
        lambda span: [span.days, span.seconds, span.microseconds],
        lambda parts: timedelta(*parts),
    ),
}
