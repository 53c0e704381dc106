"""GPUs that draft, GPUs that verify, and the window (SpecActor, Algorithm 1). Pure.

    group = 1 verifier of g_v GPUs + g_d drafter GPUs        b = ceil((g_d + g_v) B / G) requests
    D = draft_s(ceil(b / g_d), w) / w         V = verify_s(g_v, b, m), m: what a step verifies

B requests and G GPUs in all. The paper's TGS is the speed of one request in a batch of b. All B
go on at that speed, so the cluster generates B TGS tokens per second, and a larger share of
drafters, which makes b larger, pays for itself within TGS. Hence the plan with the largest TGS is
that with the most tokens per second, which is what a plan states.

Deviations:
- The paper bounds the window by w_max = max(ceil(V' / D'), ceil(beta / alpha)) with the affine
  coefficients of V and D (line 5). V' and beta depend on the window that they bound, and alpha is 0
  for lookups. With tau_w the bound loses nothing: beyond it TGS = tau_w / (w D), which falls. With
  the exact expectation it can lose, as no drafter is fast enough to make all of the next window
  always be there (`tests/specactor/test_planner.py`). Here windows end where one more token of
  window changes nothing: what a step finds to verify is less than that, whatever the window.
- V is not that of a full window: a step verifies what has come (`expectation.settled_step`).
- A drafter takes one GPU, and g_d of them share the requests of a group.
- A group may be a fraction of one where G is no multiple of its size, as in the paper.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from engines.latency.forecast import step_s
from engines.latency.interface import Latency
from engines.specactor.expectation import settled_step


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
    best, num_requests = ExecutionPlan(0, 0, 0, 0.0), cluster.num_requests
    for drafter_gpus, verifier_gpus in _layouts(cluster):
        batch = math.ceil((drafter_gpus + verifier_gpus) * num_requests / cluster.num_gpus)
        context_tokens = batch * cluster.context_tokens_each
        verify_s = partial(step_s, latency, verifier_gpus, batch, context_tokens)
        before = None
        for window in range(1, max_window + 1):
            # Each drafter has its share of the batch.
            draft_s = latency.draft_s(drafter, math.ceil(batch / drafter_gpus), window)
            settled = settled_step(window, acceptance, draft_s / window, verify_s)
            if settled == before:
                break
            before, tokens_per_s = settled, num_requests * settled.tokens_per_s
            if tokens_per_s > best.tokens_per_s:
                best = ExecutionPlan(drafter_gpus, verifier_gpus, window, tokens_per_s)
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
