"""Prompts of a data set."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


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
    source: str = ""
    """Source of a mixture that the row comes from (`data.train`). Empty without a mixture."""


class PassRate(NamedTuple):
    """How often a prompt was solved when it was last drawn."""

    rate: float
    """Share of its responses that passed, from 0 to 1."""
    epoch: int
    """Epoch that drew it, from 0."""
