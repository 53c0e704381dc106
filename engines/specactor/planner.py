"""Splits GPUs into drafters and verifiers, and chooses the window (SpecActor, Algorithm 1). Pure.

    group = 1 verifier of g_v GPUs + g_d drafter GPUs        b = ceil((g_d + g_v) B / G) requests
    D = draft_s(ceil(b / g_d), 1)             V = verify_s(g_v, b, m), m: tokens verified per step

B requests and G GPUs in all. The paper's TGS is the speed of one request in a batch of b. All B
requests run at that speed, so the cluster generates B TGS tokens per second. A larger share of
drafters makes b larger, and TGS already includes this cost. Hence the plan with the largest TGS is
the one with the most tokens per second, which a plan states.

Deviations:
- The paper bounds the window by w_max = max(ceil(V' / D'), ceil(beta / alpha)) with the affine
  coefficients of V and D (line 5). V' and beta depend on the window that they bound, and alpha is 0
  for lookups. With tau_w the bound loses nothing: beyond it TGS = tau_w / (w D), which falls. With
  the exact expectation it can lose, because no drafter is so fast that a step always finds the next
  whole window (`tests/specactor/test_planner.py`). Here windows end where one more token of window
  changes nothing. `split_gpus` tries all windows: a longer one may still be faster.
- V is not the time of a full window. A step verifies what has arrived
  (`engines.latency.drafting_pace`).
- A drafter takes one GPU, and g_d of them share the requests of a group.
- As in the paper, a group may be a fraction of one if G is no multiple of its size. A run has whole
  engines and whole drafters, and each drafter drafts for some of the engines. `split_gpus` plans
  the number of both, for verifiers of one TP degree.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from engines.latency.drafting_pace import decoupled_paces, pace
from engines.latency.forecast import step_s
from engines.latency.interface import Latency
from schemas.rollout import DraftSetting


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """How each group of GPUs generates, the same in all groups."""

    drafter_gpus: int
    """GPUs that draft. 0: the verifier's own GPUs draft in turn, or nothing drafts."""
    verifier_gpus: int
    """TP degree of the verifier."""
    window: int
    """Draft tokens per verification. 0: plain decoding."""
    tokens_per_s: float
    """Expected tokens per second of the whole cluster."""

    @property
    def coupled(self) -> bool:
        return self.drafter_gpus == 0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Requests and GPUs to plan for."""

    num_requests: int
    """Requests at the start of the rollout (B)."""
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


@dataclass(frozen=True, slots=True)
class GpuSplit:
    """Whole engines and drafters on a number of GPUs."""

    num_engines: int
    num_drafters: int
    """Drafters with one GPU each, at most one per engine."""
    window: int
    """Draft tokens per verification."""
    batch: int
    """Requests of an engine at the start."""
    tokens_per_s: float
    """Expected tokens per second of all engines."""
    plain_tokens_per_s: float
    """Tokens per second with engines on all GPUs and no drafts."""


def plan_decoupled(
    cluster: Cluster,
    latency: Latency,
    drafter: str,
    acceptance: float,
    *,
    max_window: int = 32,
) -> ExecutionPlan:
    """Return the decoupled plan with the most tokens per second, whether or not decoupling pays.

    `acceptance`: the probability p that a token is accepted (`ladder.token_acceptance`). Raise
    ValueError if no drafter fits beside a verifier.
    """
    best, num_requests = ExecutionPlan(0, 0, 0, 0.0), cluster.num_requests
    for drafter_gpus, verifier_gpus in _layouts(cluster):
        batch = math.ceil((drafter_gpus + verifier_gpus) * num_requests / cluster.num_gpus)
        context_tokens = batch * cluster.context_tokens_each
        verify_s = partial(step_s, latency, verifier_gpus, batch, context_tokens)
        # Each drafter drafts for its share of the batch.
        token_s = latency.draft_s(drafter, math.ceil(batch / drafter_gpus), 1)
        paces = decoupled_paces(drafter, acceptance, token_s, verify_s, max_window)
        for setting, of in paces.items():
            speed = num_requests * of.tokens_per_s
            if speed > best.tokens_per_s:
                best = ExecutionPlan(drafter_gpus, verifier_gpus, setting.window, speed)
    if best.coupled:
        raise ValueError(f"{cluster.num_gpus} GPUs have no room for a drafter beside a verifier")
    return best


def split_gpus(
    cluster: Cluster,
    latency: Latency,
    drafter: str,
    acceptance: float,
    *,
    max_batch: int,
    max_drafted: int,
    max_window: int = 32,
) -> GpuSplit:
    """Return the split of the GPUs with the most tokens per second, whether or not drafting pays.

    `cluster` has verifiers of one TP degree. Each runs at most `max_batch` requests at once, and
    the others wait. `max_drafted`: most requests in one step of a drafter; for more it takes
    several steps. Raise ValueError if no drafter fits beside a verifier.
    """
    num_requests, (tp_degree,) = cluster.num_requests, cluster.verifier_gpus

    def token_s(num_drafted: int) -> float:
        num_steps = math.ceil(num_drafted / max_drafted)
        return num_steps * latency.draft_s(drafter, math.ceil(num_drafted / num_steps), 1)

    def verified_s(batch: int, window: float) -> float:
        context_tokens = batch * cluster.context_tokens_each
        return step_s(latency, tp_degree, batch, context_tokens, window)

    num_plain = cluster.num_gpus // tp_degree
    batch = min(max_batch, math.ceil(num_requests / num_plain))
    plain = min(num_requests, num_plain * batch) / verified_s(batch, 0)
    best = GpuSplit(0, 0, 0, 0, 0.0, plain)
    for num_engines, num_drafters in _whole_layouts(cluster.num_gpus, tp_degree):
        batch = min(max_batch, math.ceil(num_requests / num_engines))
        at_once = min(num_requests, num_engines * batch)
        # The drafter with the most engines sets the pace.
        drafted_s = token_s(math.ceil(num_engines / num_drafters) * batch)
        verify_s = partial(verified_s, batch)
        for window in range(1, max_window + 1):
            setting = DraftSetting(drafter, window, coupled=False)
            speed = at_once * pace((setting, acceptance), drafted_s, verify_s).tokens_per_s
            if speed > best.tokens_per_s:
                best = GpuSplit(num_engines, num_drafters, window, batch, speed, plain)
    if not best.num_drafters:
        raise ValueError(
            f"{cluster.num_gpus} GPUs have no room for a drafter beside a verifier of {tp_degree}"
        )
    return best


def _whole_layouts(num_gpus: int, tp_degree: int) -> Iterator[tuple[int, int]]:
    """Yield (engines, drafters): as many engines as fit beside the drafters. Every drafter has at
    least one engine."""
    for num_drafters in range(1, num_gpus):
        num_engines = (num_gpus - num_drafters) // tp_degree
        if num_drafters > num_engines:
            return
        yield num_engines, num_drafters


def _layouts(cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield (g_d, g_v). Drafters need no more GPUs than verifiers."""
    for drafter_gpus in range(1, max(cluster.verifier_gpus) + 1):
        for verifier_gpus in cluster.verifier_gpus:
            fits = drafter_gpus + verifier_gpus <= cluster.num_gpus
            if drafter_gpus <= verifier_gpus and fits:
                yield drafter_gpus, verifier_gpus
