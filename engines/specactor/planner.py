"""Splits GPUs into drafters and verifiers, and chooses the window (SpecActor, Algorithm 1). Pure.

    e engines of g_v GPUs, d drafters of one GPU, each for ceil(e / d) engines      e g_v + d <= G
    b = ceil(B / e) requests of an engine, at most as many as it runs at once

B requests and G GPUs in all. The paper's TGS is the speed of one request in a batch of b. All
requests that run at once have that speed. So the best plan is the one with the largest product of
the two, the tokens per second, which a plan states. The speed is that of `Ladder.paces`.

Deviations:
- The paper plans groups of a few GPUs, and as many groups as fit, a fraction of one included. A run
  has whole engines and whole drafters, and each drafter drafts for some of the engines.
- The paper also chooses g_v. A run has engines of one TP degree.
- The paper bounds the window by w_max = max(ceil(V' / D'), ceil(beta / alpha)) with the affine
  coefficients of V and D (line 5). V' and beta depend on the window that they bound, and alpha is 0
  for lookups. With tau_w the bound loses nothing: beyond it TGS = tau_w / (w D), which falls. With
  the exact expectation it can lose, because no drafter is so fast that a step always finds the next
  whole window (`tests/specactor/test_planner.py`). Here windows end where one more token of window
  changes nothing.
- V is not the time of a full window. A step verifies what has arrived
  (`engines.latency.drafting_pace`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from refrain.engines.latency.interface import Latency
from refrain.engines.specactor.ladder import Ladder


@dataclass(frozen=True, slots=True)
class Cluster:
    """Requests and GPUs to plan for."""

    num_requests: int
    """Requests at the start of the rollout (B)."""
    num_gpus: int
    """GPUs of the cluster (G)."""
    tp_degree: int
    """GPUs of an engine (g_v)."""
    context_tokens_each: float
    """Typical context of a request, in tokens."""
    max_batch: int
    """Most requests that an engine runs at once. The others wait."""
    max_drafted: int
    """Most requests in one step of a drafter. For more it takes several steps."""

    def __post_init__(self) -> None:
        if not 0 < self.tp_degree <= self.num_gpus:
            raise ValueError(f"{self.num_gpus} GPUs hold no engine of {self.tp_degree} GPUs")
        if self.num_requests < 1:
            raise ValueError(f"there is nothing to plan for {self.num_requests} requests")

    def batch(self, num_engines: int) -> int:
        """Return the requests that each of so many engines runs at the start."""
        return min(self.max_batch, math.ceil(self.num_requests / num_engines))

    def at_once(self, num_engines: int) -> int:
        """Return the requests that so many engines run together."""
        return min(self.num_requests, num_engines * self.batch(num_engines))


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

    @property
    def engines_per_drafter(self) -> int:
        """Most engines that share one drafter."""
        return math.ceil(self.num_engines / self.num_drafters)


def split_gpus(
    cluster: Cluster,
    latency: Latency,
    drafter: str,
    acceptance: float,
    *,
    max_window: int = 32,
) -> GpuSplit:
    """Return the split of the GPUs with the most tokens per second, whether or not drafting pays.

    `acceptance`: the probability p that a token is accepted (`ladder.token_acceptance`). Raise
    ValueError if no drafter fits beside an engine.
    """

    def ladder(shared_by: int) -> Ladder:
        shape = cluster.tp_degree, (drafter,), cluster.context_tokens_each, max_window
        return Ladder(latency, *shape, {drafter: shared_by}, cluster.max_drafted)

    num_plain = cluster.num_gpus // cluster.tp_degree
    step = ladder(1).pace(None, acceptance, cluster.batch(num_plain))
    plain = cluster.at_once(num_plain) * step.tokens_per_s
    best = GpuSplit(0, 0, 0, 0, 0.0, plain)
    for num_engines, num_drafters in _layouts(cluster.num_gpus, cluster.tp_degree):
        batch = cluster.batch(num_engines)
        # The drafter with the most engines sets the pace.
        shared_by = math.ceil(num_engines / num_drafters)
        for setting, of in ladder(shared_by).paces(drafter, acceptance, batch).items():
            speed = cluster.at_once(num_engines) * of.tokens_per_s
            if setting and speed > best.tokens_per_s:
                best = GpuSplit(num_engines, num_drafters, setting.window, batch, speed, plain)
    if not best.num_drafters:
        raise ValueError(
            f"{cluster.num_gpus} GPUs have no room for a drafter beside an engine of "
            f"{cluster.tp_degree}"
        )
    return best


def _layouts(num_gpus: int, tp_degree: int) -> Iterator[tuple[int, int]]:
    """Yield (engines, drafters): the most engines that fit, and the fewest drafters with which each
    drafter serves as many. Every drafter has at least one engine."""
    seen: set[tuple[int, int]] = set()
    for num_drafters in range(1, num_gpus):
        num_engines = (num_gpus - num_drafters) // tp_degree
        if num_drafters > num_engines:
            return
        shape = num_engines, math.ceil(num_engines / num_drafters)
        if shape not in seen:
            seen.add(shape)
            yield num_engines, num_drafters
