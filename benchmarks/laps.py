"""Laps of a bench, and medians over them."""

from argparse import Namespace
from collections.abc import Sequence
from statistics import median
from typing import Any, TypeVar

Row = dict[str, Any]
Measured = tuple[dict[str, int | float], Sequence[Row]]
"""Figures and rows of a `BenchReport`."""
T = TypeVar("T")


def check_counts(args: Namespace, *names: str) -> None:
    """Raise ValueError for an argument below 1."""
    for name in names:
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give at least 1")


def in_turn(names: Sequence[T], lap: int) -> list[T]:
    """Return the names in rotated order: each lap begins with another one."""
    first = lap % len(names)
    return [*names[first:], *names[:first]]


def rows_with(rows: Sequence[Row], **values: Any) -> list[Row]:
    """Return the rows that have these values."""
    return [row for row in rows if values.items() <= row.items()]


def median_of(rows: Sequence[Row], column: str, **values: Any) -> float:
    """Return the median of a column over the rows that have these values."""
    return median(row[column] for row in rows_with(rows, **values))
