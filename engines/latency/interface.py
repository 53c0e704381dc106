"""Latency model that every policy and every simulated engine uses. All times are in seconds."""

from typing import Protocol, runtime_checkable


class Latency(Protocol):
    """Predicted times of one model on one kind of hardware."""

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        """Return the time of a decoding step of `batch` sequences with `context_tokens` tokens in
        total."""
        ...

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        """Return the time to prefill `batch` prompts whose root-mean-square length is
        `rms_tokens`."""
        ...

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        """Return the time of a step that verifies `window` draft tokens of each sequence. Window 0
        is a decoding step."""
        ...

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        """Return the time to draft `window` tokens for each of `batch` sequences."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """Latency model from measurements, which cover a limited range."""

    def reaches(self, tp_degree: int, batch: int, context_tokens: float) -> bool:
        """Return whether the measurements cover decoding steps with so many sequences and total
        tokens. Beyond them a time is a guess. Fewer tokens than measured count as covered: such a
        step takes no longer."""
        ...
