"""Prompts as they come from a data set."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set, tokenised."""

    key: str
    """Hash of the prompt's token ids (`schemas.keys.prompt_key`). Further rows of the same prompt
    with other `extra_info` have keys of their own (`variant_key`). History, noise and rewards are
    keyed by this, never by a row number."""
    token_ids: tuple[int, ...]
    data_source: str
    """Selects the scorer."""
    ground_truth: Any
    """Whatever the data set gives the scorer: a str, a list or a JSON string."""
    extra_info: dict[str, Any] = field(default_factory=dict)
