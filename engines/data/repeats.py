"""Rows that have the same prompt: which of them are samples of their own, and what the others must
agree on.

    extra_info differs     two samples: a scorer may score them differently
    index, split differ    a repeat: these say where a row stood, not what it asks
    nothing else differs   a repeat, which must have the same ground truth and data source
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from schemas.data import Prompt
from schemas.keys import variant_key

MAX_ERRORS_SHOWN = 5
PLACE = ("index", "split")
"""Entries of veRL's `extra_info` that say where a row stood in its data set."""


class RowName(NamedTuple):
    """A row of a file, for people."""

    path: Path
    number: int
    """Rows are counted from 1."""

    def __str__(self) -> str:
        return f"{self.path} row {self.number}"


def content_hash(extra_info: Mapping[str, Any]) -> str:
    """Hash of the extra information that a row gives a scorer, whatever file it stood in."""
    told = {name: value for name, value in extra_info.items() if name not in PLACE}
    text = json.dumps(_given(told), sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _given(value: Any) -> Any:
    """A value without the empty fields that Parquet adds to objects that lack them."""
    if isinstance(value, dict):
        return {name: _given(inner) for name, inner in value.items() if inner is not None}
    return list(map(_given, value)) if isinstance(value, list) else value


class Samples:
    """Rows that repeat none before them, each with a key of its own."""

    def __init__(self) -> None:
        self.prompts: dict[str, Prompt] = {}
        """Prompts by key."""
        self._keys: dict[tuple[tuple[int, ...], str], str] = {}

    def find(self, prompt: Prompt) -> Prompt | None:
        """Return the row that this one repeats, if there is one."""
        key = self._keys.get((prompt.token_ids, content_hash(prompt.extra_info)))
        return self.prompts[key] if key else None

    def add(self, prompt: Prompt) -> Prompt:
        """Add a row that repeats none. The first of a prompt keeps its key, others get another."""
        content = content_hash(prompt.extra_info)
        if prompt.key in self.prompts:
            prompt = replace(prompt, key=variant_key(prompt.key, content))
        self._keys[prompt.token_ids, content] = prompt.key
        self.prompts[prompt.key] = prompt
        return prompt


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
                "rows are counted from 1): correct one of them, remove it, or tell them apart in "
                "`extra_info`",
                *named,
            ]
        )
    )


def shown(value: Any) -> str:
    """A value for a message, cut short."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
