"""Latency models that are affine in the batch, as in SpecActor (section 4.1)."""

from dataclasses import dataclass, field

from hypothesis import strategies as st


@dataclass(frozen=True)
class AffineLatency:
    """V_w(b) = (base + b (each + w per_draft)) / g_v^0.7. A draft token takes D(b) = alpha + b
    slope."""

    base_s: float = 10e-3
    each_s: float = 20e-6
    per_draft_s: float = 15e-6
    drafters: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {"small": (1e-3, 1e-6), "large": (3e-3, 4e-6), "ngram": (0.0, 1e-6)}
    )

    def decode_s(self, tp_degree, batch, context_tokens):
        return self.verify_s(tp_degree, batch, context_tokens, 0)

    def prefill_s(self, tp_degree, batch, rms_tokens):
        del tp_degree, batch, rms_tokens
        raise AssertionError("no policy of this package asks for it")

    def verify_s(self, tp_degree, batch, context_tokens, window):
        del context_tokens
        return (self.base_s + batch * (self.each_s + window * self.per_draft_s)) / tp_degree**0.7

    def draft_s(self, drafter, batch, window):
        alpha_s, slope_s = self.drafters[drafter]
        return window * (alpha_s + batch * slope_s)


milliseconds = st.floats(0.01, 20).map(lambda ms: ms * 1e-3)
microseconds = st.floats(0.0, 200).map(lambda us: us * 1e-6)
affine_latencies = st.builds(
    AffineLatency,
    milliseconds,
    microseconds,
    microseconds,
    st.fixed_dictionaries({"small": st.tuples(milliseconds, microseconds)}),
)
