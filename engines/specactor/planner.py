"""GPUs that draft, GPUs that verify, and the window (SpecActor, Algorithm 1). Pure.

    group = 1 verifier of g_v GPUs + g_d drafter GPUs        b = ceil((g_d + g_v) B / G) requests
    D = draft_s(ceil(b / g_d), w) / w                        V = verify_s(g_v, b, w)

B requests and G GPUs in all. The paper's TGS is the speed of one request in a batch of b. All B
go on at that speed, so the cluster generates B TGS tokens per second, and a larger share of
drafters, which makes b larger, pays for itself within TGS. Hence the plan with the largest TGS is
that with the most tokens per second, which is what a plan states.

Deviations:
- The paper bounds the window by w_max = max(ceil(V' / D'), ceil(beta / alpha)) with the affine
  coefficients of V and D (line 5). V' and beta depend on the window that they bound, and alpha is 0
  for lookups. With tau_w the bound loses nothing: beyond it TGS = tau_w / (w D), which falls. With
  the exact expectation it can lose, as no drafter is fast enough to make all of the next window
  always be there (`tests/specactor/test_planner.py`). Here a window is left out, and with it all
  longer ones, when even drafts that come at once and without end would be too slow:
  (1 + p + ... + p^max_window) / V <= TGS*. This needs only that V does not fall with the window.
- A drafter takes one GPU, and g_d of them share the requests of a group.
- A group may be a fraction of one where G is no multiple of its size, as in the paper.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from engines.latency.interface import Latency
from engines.specactor.expectation import expected_tokens, streamed_tokens_per_s


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How each group of GPUs generates. The same in all groups."""

    drafter_gpus: int
    """GPUs that draft; 0: the verifier's own draft, in turn, or nobody does."""
    verifier_gpus: int
    """TP degree of the verifier."""
    window: int
    """Draft tokens per verification; 0: plain decoding."""
    tokens_per_s: float
    """Expected tokens per second of the whole cluster."""

    @property
    def coupled(self) -> bool:
        return self.drafter_gpus == 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Requests and GPUs that are planned for."""

    num_requests: int
    """Requests at the beginning of the rollout (B)."""
    num_gpus: int
    """GPUs of the cluster (G)."""
    verifier_gpus: tuple[int, ...]
    """TP degrees at which the model fits."""
    context_tokens_each: float
    """Typical context of a request, in tokens."""

    def __post_init__(self) -> None:
        if not self.verifier_gpus or not all(
            0 < gpus <= self.num_gpus for gpus in self.verifier_gpus
        ):
            raise ValueError(f"{self.num_gpus} GPUs hold no verifier of {self.verifier_gpus} GPUs")
        if self.num_requests < 1:
            raise ValueError(f"there is nothing to plan for {self.num_requests} requests")


def plan_decoupled(
    cluster: Cluster,
    latency: Latency,
    drafter: str,
    acceptance: float,
    *,
    max_window: int = 32,
) -> ExecutionPlan:
    """The plan with the most tokens per second among those that decouple, whether or not it pays.

    `acceptance`: the probability p that a token is accepted (`ladder.token_acceptance`). Raises
    ValueError where no drafter fits beside a verifier.
    """
    best, limit = ExecutionPlan(0, 0, 0, 0.0), expected_tokens(max_window, acceptance)
    for layout in _layouts(cluster):
        group = _GpuGroup(cluster, latency, drafter, *layout)
        for window in range(1, max_window + 1):
            if cluster.num_requests * limit / group.verify_s(window) <= best.tokens_per_s:
                break
            tokens_per_s = cluster.num_requests * group.tgs(window, acceptance)
            if tokens_per_s > best.tokens_per_s:
                best = ExecutionPlan(*layout, window, tokens_per_s)
    if best.coupled:
        raise ValueError(f"{cluster.num_gpus} GPUs have no room for a drafter beside a verifier")
    return best


def _layouts(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(g_d, g_v): drafters need no more GPUs than verifiers."""
    for drafter_gpus in range(1, max(cluster.verifier_gpus) + 1):
        for verifier_gpus in cluster.verifier_gpus:
            fits = drafter_gpus + verifier_gpus <= cluster.num_gpus
            if drafter_gpus <= verifier_gpus and fits:
                yield drafter_gpus, verifier_gpus


@dataclass(frozen=True, slots=True)
class _GpuGroup:
    """One verifier and the drafter GPUs beside it."""

    cluster: Cluster
    latency: Latency
    drafter: str
    drafter_gpus: int
    verifier_gpus: int

    @property
    def batch(self) -> int:
        """Requests of the group (b)."""
        group_gpus = self.drafter_gpus + self.verifier_gpus
        return math.ceil(group_gpus * self.cluster.num_requests / self.cluster.num_gpus)

    def verify_s(self, window: int) -> float:
        context_tokens = self.batch * self.cluster.context_tokens_each
        return self.latency.verify_s(self.verifier_gpus, self.batch, context_tokens, window)

    def tgs(self, window: int, acceptance: float) -> float:
        """Tokens per second of one request. Its drafter has its share of the batch."""
        share = math.ceil(self.batch / self.drafter_gpus)
        draft_s = self.latency.draft_s(self.drafter, share, window)
        return streamed_tokens_per_s(window, acceptance, draft_s / window, self.verify_s(window))
