"""A latency model for tests: linear step times, with drafting."""

from dataclasses import dataclass

from refrain.benchmarks.papers import settings as papers


@dataclass(frozen=True)
class LinearLatency(papers.LinearLatency):
    """Verification takes 1% of a step more per draft token. Drafting takes 1 ms a token."""

    step_s: float = 0.01

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        return self.decode_s(tp_degree, batch, context_tokens) * (1 + 0.01 * window)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        return 0.001 * window if drafter else 0.0 * batch
