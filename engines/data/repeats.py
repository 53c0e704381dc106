"""Tell rows with the same prompt apart: distinct samples, or repeats that must agree.

    extra_info differs          two samples, because a scorer may score them differently
    only index, split differ    a repeat: these two give the row's place in a file
    nothing differs             a repeat

A repeat must have the same ground truth and data source.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from refrain.schemas.data import Prompt
from refrain.schemas.keys import variant_key

MAX_ERRORS_SHOWN = 5
PLACE = ("index", "split")
"""Entries of veRL's `extra_info` that give a row's place in its data set."""


class RowName(NamedTuple):
    """Name of a row in messages."""

    path: Path
    number: int
    """Number of the row, from 1."""

    def __str__(self) -> str:
        return f"{self.path} row {self.number}"


def content_hash(extra_info: Mapping[str, Any]) -> str:
    """Return a hash of the extra information without the row's place in its file."""
    told = {name: value for name, value in extra_info.items() if name not in PLACE}
    text = json.dumps(_given(told), sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _given(value: Any) -> Any:
    """Return a value without None fields, because Parquet adds them to objects that lack a
    field."""
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return list(map(_given, value)) if isinstance(value, list) else value


class Samples:
    """Collection of distinct rows, each with its own key."""

    def __init__(self) -> None:
        self.prompts: dict[str, Prompt] = {}
        """Prompts by key."""
        self._keys: dict[tuple[tuple[int, ...], str], str] = {}

    def find(self, prompt: Prompt) -> Prompt | None:
        """Return the earlier row that this one repeats, if any."""
        key = self._keys.get((prompt.token_ids, content_hash(prompt.extra_info)))
        return self.prompts[key] if key else None

    def add(self, prompt: Prompt) -> Prompt:
        """Add a row that repeats no earlier one. The first row of a prompt keeps its key, later
        rows of the same prompt get a new one."""
        content = content_hash(prompt.extra_info)
        if prompt.key in self.prompts:
            prompt = replace(prompt, key=variant_key(prompt.key, content))
        self._keys[prompt.token_ids, content] = prompt.key
        self.prompts[prompt.key] = prompt
        return prompt


def contradiction(first: Prompt, later: Prompt) -> str:
    """Describe how two rows of one prompt disagree. Empty if they agree."""
    if first.data_source != later.data_source:
        return f"data_source {first.data_source!r} and {later.data_source!r}"
    return other_truth(first, later)


def other_truth(first: Prompt, later: Prompt) -> str:
    """Describe how the ground truths of two rows disagree. Empty if they agree."""
    if first.ground_truth == later.ground_truth:
        return ""
    return f"ground_truth {shown(first.ground_truth)} and {shown(later.ground_truth)}"


def refuse(contradictions: Sequence[str]) -> None:
    """Raise ValueError that lists the contradictions, if there are any."""
    if not contradictions:
        return
    more = len(contradictions) - MAX_ERRORS_SHOWN
    named = [*contradictions[:MAX_ERRORS_SHOWN], *([f"({more} more)"] if more > 0 else [])]
    raise ValueError(
        "\n  ".join(
            [
                f"several rows have the same prompt but do not agree ({len(contradictions)}; "
                "rows are counted from 1): correct one of them, remove it, or give them different "
                "values in `extra_info`",
                *named,
            ]
        )
    )


def shown(value: Any) -> str:
    """Return a value as text for a message, at most 60 characters of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
