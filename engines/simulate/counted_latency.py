"""A fitted latency model that counts how many of its answers were extrapolated."""

from refrain.engines.latency.curves import Estimate
from refrain.engines.latency.fitted import FittedLatency
from refrain.schemas.latency import PointKind, Profile


class CountedLatency:
    """A `FittedLatency` with counts of its queries. Implements `Latency` and `Bounded`."""

    def __init__(self, profile: Profile) -> None:
        self._fitted = FittedLatency(profile)
        decode = profile.of_kind(PointKind.DECODE)
        self._profiled = (max(p.batch for p in decode), max(p.context_tokens for p in decode))
        self._asked = (0, 0.0)
        self.num_asked = 0
        self.num_extrapolated = 0

    @property
    def complaint(self) -> str:
        """A line about extrapolation; empty when there was none."""
        if not self.num_extrapolated:
            return ""
        batch, context_tokens = self._asked
        return (
            f"{self.num_extrapolated:,} of {self.num_asked:,} times were extrapolated: decoding "
            f"was profiled up to batch {self._profiled[0]} and {self._profiled[1]:,} tokens of "
            f"context (fewer in smaller batches), but {batch} and {context_tokens:,.0f} were needed"
        )

    def reaches(self, tp_degree: int, batch: int, context_tokens: float) -> bool:
        return self._fitted.reaches(tp_degree, batch, context_tokens)

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        self._note(batch, context_tokens)
        estimate = self._fitted.decode_estimate(tp_degree, batch, context_tokens)
        return self._count(estimate, context_tokens)

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        return self._count(self._fitted.prefill_estimate(tp_degree, batch, rms_tokens), rms_tokens)

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        self._note(batch, context_tokens)
        estimate = self._fitted.verify_estimate(tp_degree, batch, context_tokens, window)
        return self._count(estimate, context_tokens)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        return self._count(self._fitted.draft_estimate(drafter, batch, window), batch * window)

    def _note(self, batch: int, context_tokens: float) -> None:
        largest, longest = self._asked
        self._asked = (max(largest, batch), max(longest, context_tokens))

    def _count(self, estimate: Estimate, tokens: float) -> float:
        # Skip queries of `check_latency`, which have one token. A simulated step has more.
        if tokens > 1.0:
            self.num_asked += 1
            self.num_extrapolated += estimate.extrapolated
        return estimate.seconds
