"""Questions that every policy and every virtual engine asks of a latency model. All times are
seconds."""

from typing import Protocol, runtime_checkable


class Latency(Protocol):
    """Predicted times on one kind of hardware with one model."""

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        """One decoding step of `batch` sequences with `context_tokens` tokens in all."""
        ...

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        """Prefill of `batch` prompts whose root-mean-square length is `rms_tokens`."""
        ...

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        """One step that verifies `window` draft tokens of each sequence; 0 is a decoding step."""
        ...

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        """Drafting `window` tokens for each of `batch` sequences."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A latency model of measurements, which end somewhere."""

    def reaches(self, tp_degree: int, batch: int, context_tokens: float) -> bool:
        """Whether decoding steps were measured with as many sequences, and with as many tokens in
        all. What lies beyond is a guess; with fewer tokens than measured, a step takes no longer.
        """
        ...
