"""Prompts of a data set."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a data set, tokenised."""

    key: str
    """Hash of the prompt's token ids (`schemas.keys.prompt_key`). Other rows of the same prompt
    with other `extra_info` have keys of their own (`variant_key`). History, noise and rewards use
    this key, never a row number."""
    token_ids: tuple[int, ...]
    data_source: str
    """Selects the scorer."""
    ground_truth: Any
    """Data for the scorer, as in the data set: a str, a list or a JSON string."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages that the chat template renders, such as `{"role": "user", "content": "1+1=?"}`."""
