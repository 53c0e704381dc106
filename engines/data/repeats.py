"""Rows that have the same prompt: what they must agree on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from schemas.data import Prompt

MAX_ERRORS_SHOWN = 5


class RowName(NamedTuple):
    """A row of a file, for people."""

    path: Path
    number: int
    """Rows are counted from 1."""

    def __str__(self) -> str:
        return f"{self.path} row {self.number}"


def contradiction(first: Prompt, later: Prompt) -> str:
    """Disagreement of two rows of one prompt; empty where there is none that counts."""
    if first.data_source != later.data_source:
        return f"data_source {first.data_source!r} and {later.data_source!r}"
    return other_truth(first, later)


def other_truth(first: Prompt, later: Prompt) -> str:
    """Disagreement about the ground truth alone."""
    if first.ground_truth == later.ground_truth:
        return ""
    return f"ground_truth {shown(first.ground_truth)} and {shown(later.ground_truth)}"


def refuse(contradictions: Sequence[str]) -> None:
    """Raises ValueError that names them, where there are some."""
    if not contradictions:
        return
    more = len(contradictions) - MAX_ERRORS_SHOWN
    named = [*contradictions[:MAX_ERRORS_SHOWN], *([f"({more} more)"] if more > 0 else [])]
    raise ValueError(
        "\n  ".join(
            [
                f"the same prompt stands in several rows that do not agree ({len(contradictions)}; "
                "rows are counted from 1): correct one of them or remove it",
                *named,
            ]
        )
    )


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
