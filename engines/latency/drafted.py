"""Latency models of decoding in which each pass verifies drafts, per token of every request."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from refrain.engines.latency.interface import Latency


class DraftingIncluded(ABC):
    """Implements `Latency` with drafting in the time of decoding, for plans, which ask for nothing
    else."""

    @abstractmethod
    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float: ...

    @abstractmethod
    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float: ...

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        assert window == 0, "drafting is in the time of decoding"
        return self.decode_s(tp_degree, batch, context_tokens)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        raise AssertionError(f"{drafter} has drafted {window} tokens for {batch} already")


@dataclass(frozen=True, slots=True)
class DraftedLatency(DraftingIncluded):
    """Each pass gains and verifies as much as the mean pass of the last step."""

    latency: Latency
    tokens_per_pass: float
    """Tokens that a request gains in a pass."""
    window: int
    """Draft tokens that a pass verifies for each request."""

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        pass_s = self.latency.verify_s(tp_degree, batch, context_tokens, self.window)
        return pass_s / self.tokens_per_pass

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self.latency.prefill_s(tp_degree, batch, rms_tokens)
