"""A latency for tests: straight lines, with drafting."""

from dataclasses import dataclass

from benchmarks.papers import settings as papers


@dataclass(frozen=True)
class LinearLatency(papers.LinearLatency):
    """Verifying costs a hundredth of a step for each token drafted, drafting 1 ms."""

    step_s: float = 0.01

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        return self.decode_s(tp_degree, batch, context_tokens) * (1 + 0.01 * window)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        return 0.001 * window if drafter else 0.0 * batch
