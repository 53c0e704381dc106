"""PAT beside static TP degrees at the points of its evaluation, what its parts bring, and why.

    static    each TP degree that fits, throughout: veRL, of which the best is taken (5.1)
    PAT       Algorithm 1 from a base of TP 2, as in Fig. 12 and 14, and from the best static one

Everything is the mean over five steps, as in section 5.1. Deviation: PAT takes lengths from history
where the paper takes the maximum (`engines.pat.remaining`); the ablation has both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from benchmarks.papers.generate import TraceSpec, generate
from benchmarks.papers.pat import GROUP_SIZE, STEPS, TP_DEGREES, Machine, free
from benchmarks.papers.pools import Nodes, PooledRun, simulate_pools
from benchmarks.papers.real_run import bare_plan, run_config
from benchmarks.papers.script import known_before
from engines.control.techniques import MoveModel, StepFacts, plan_policies
from engines.pat.costs import SwitchCosts
from engines.pat.remaining import FromHistory, Maximum, Remaining
from engines.rollout.moves import Policy
from engines.simulate.cluster import step_requests
from engines.simulate.trace import Trace
from schemas.config import TrainConfig
from schemas.layout import Pool
from schemas.rollout import RequestId

PRINTED_BASE = 2
"""TP degree that the paper switches from (Fig. 12, 14) and that its printed times are those of."""
Lengths = Literal["history", "maximum", "exact"]


@dataclass(frozen=True, slots=True)
class SwitchingVariant:
    """A way to switch."""

    name: str = "PAT"
    lengths: Lengths = "history"
    """How long responses are taken to go on; exactly, as nobody can know."""
    waits: bool = True
    """A switch now is weighed against a later one; not so in the paper."""
    kv: Literal["auto", "move", "recompute"] = "auto"
    max_switches: float = math.inf
    free: bool = False
    """Switches take no time."""


PAT = SwitchingVariant()


@dataclass(frozen=True, slots=True)
class Exact:
    """Tokens that responses really have to come; implements `Remaining`."""

    lengths: Mapping[RequestId, int]

    def tokens(self, generated: Mapping[RequestId, int]) -> dict[RequestId, float]:
        return {id: max(1.0, float(self.lengths[id] - num)) for id, num in generated.items()}


@dataclass(frozen=True, slots=True)
class Runs:
    """The same on every step."""

    runs: tuple[PooledRun, ...]

    @property
    def seconds(self) -> float:
        return fmean(run.step_s for run in self.runs)

    @property
    def num_switches(self) -> float:
        """Switches in a step, of all pools."""
        return fmean(len(run.switches) for run in self.runs)

    @property
    def switch_s(self) -> float:
        """Seconds of switching in a step, of the pool that took the longest over it."""
        return fmean(_slowest_pool_s(run) for run in self.runs)

    @property
    def moved_share(self) -> float:
        """Share of the switches that moved keys and values."""
        moved = [switch.moved_kv for run in self.runs for switch in run.switches]
        return fmean(moved) if moved else 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Responses of a point, with the epoch before them."""

    machine: Machine
    trace: Trace
    steps: tuple[int, ...] = STEPS

    @classmethod
    def draw(cls, machine: Machine, spec: TraceSpec, seed: int, steps: Sequence[int] = STEPS):
        return cls(machine, generate(spec, seed), tuple(steps))

    @property
    def num_tokens(self) -> float:
        """Response tokens of a step."""
        return fmean(
            float(self.trace.step(step).column("response_tokens").sum()) for step in self.steps
        )

    def static(self, tp_degree: int) -> Runs:
        nodes = self.machine.nodes(tp_degree)
        return Runs(tuple(simulate_pools(self.trace.step(step), nodes) for step in self.steps))

    def switched(self, base: int, variant: SwitchingVariant = PAT) -> Runs:
        nodes = self.machine.nodes(base, tuple(tp for tp in TP_DEGREES if tp > base))
        return Runs(tuple(self._switched(step, nodes, variant) for step in self.steps))

    def _switched(self, step: int, nodes: Nodes, variant: SwitchingVariant) -> PooledRun:
        costs = self.machine.costs(variant.kv)
        if variant.free:
            costs = free(costs)

        def plan(pools: Sequence[Pool]) -> Policy:
            return self._policy(step, nodes, variant, costs, pools)

        return simulate_pools(self.trace.step(step), nodes, costs, plan, variant.max_switches)

    def _policy(
        self,
        step: int,
        nodes: Nodes,
        variant: SwitchingVariant,
        costs: SwitchCosts,
        pools: Sequence[Pool],
    ) -> Policy:
        """Policy of a real run with these settings."""
        config, prompt_tokens = self._config(nodes, variant), self.prompt_tokens(step)
        model = MoveModel(
            latency=self.machine.latency,
            costs=costs,
            pools=pools,
            remaining=self.remaining(step, variant.lengths),
            prompt_tokens=prompt_tokens,
        )
        plan = bare_plan(step, list(prompt_tokens), GROUP_SIZE)
        (policy,) = plan_policies(config, StepFacts(plan=plan, move_model=model))
        return policy

    def _config(self, nodes: Nodes, variant: SwitchingVariant) -> TrainConfig:
        return run_config(
            self.machine.point.max_tokens,
            rollout={
                "num_engines": nodes.num_gpus // nodes.tp_degree,
                "tp_degree": nodes.tp_degree,
                "group_size": GROUP_SIZE,
                "max_num_seqs": nodes.max_num_seqs,
            },
            pat={
                "tp_degrees": nodes.higher_tp_degrees,
                "lengths": "maximum" if variant.lengths == "maximum" else "history",
                "waits": variant.waits,
                "kv": variant.kv,
            },
        )

    def prompt_tokens(self, step: int) -> dict[str, int]:
        rows = self.trace.step(step)
        keys, tokens = rows.table["prompt_key"].to_pylist(), rows.column("prompt_tokens").tolist()
        return dict(zip(keys, tokens, strict=True))

    def remaining(self, step: int, lengths: Lengths) -> Remaining:
        max_tokens = self.machine.point.max_tokens
        if lengths == "maximum":
            return Maximum(max_tokens)
        if lengths == "exact":
            return Exact(step_requests(self.trace.step(step), step)[1])
        history = known_before(self.trace, step, self.prompt_tokens(step))
        return FromHistory(history, max_tokens, group_size=GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class Comparison:
    """PAT and static TP degrees on the same responses."""

    name: str
    steps: Steps = field(repr=False)
    static: Mapping[int, Runs]
    """Runs by static TP degree, those that fit."""
    pat: Mapping[int, Runs]
    """Runs of PAT by base."""

    @property
    def best_static(self) -> int:
        return min(self.static, key=lambda tp_degree: self.static[tp_degree].seconds)

    @property
    def best_base(self) -> int:
        return min(self.pat, key=lambda base: self.pat[base].seconds)

    @property
    def best_pat(self) -> Runs:
        return self.pat[self.best_base]

    def reduction(self, static: int, base: int) -> float:
        """Share of generation that PAT from this base saves of that of a static TP degree."""
        return 1 - self.pat[base].seconds / self.static[static].seconds

    def speedup(self, static: int, base: int) -> float:
        """Speed-up of an iteration."""
        rest_s = self.steps.machine.point.rest_s(self.steps.num_tokens)
        return (self.static[static].seconds + rest_s) / (self.pat[base].seconds + rest_s)


def compare(name: str, steps: Steps) -> Comparison:
    """Each static TP degree; PAT from the printed base and from the best static one.

    From the highest there is nothing to switch to: PAT is then that static one.
    """
    static = {tp: steps.static(tp) for tp in TP_DEGREES if steps.machine.fits(tp)}
    best = min(static, key=lambda tp_degree: static[tp_degree].seconds)
    bases = sorted({PRINTED_BASE, best})
    highest = max(TP_DEGREES)
    pat = {base: steps.switched(base) if base < highest else static[base] for base in bases}
    return Comparison(name, steps, static, pat)


def uniform_switches(steps: Steps) -> int:
    """Switches where all responses have one length, from the TP degree that is the best for it."""
    static = {tp: steps.static(tp).seconds for tp in TP_DEGREES if steps.machine.fits(tp)}
    best = min(static, key=static.__getitem__)
    if best == max(TP_DEGREES):
        return 0
    return sum(len(run.switches) for run in steps.switched(best).runs)


def _slowest_pool_s(run: PooledRun) -> float:
    taken_s = dict.fromkeys(range(len(run.pools)), 0.0)
    for switch in run.switches:
        taken_s[switch.pool] += switch.seconds
    return max(taken_s.values(), default=0.0)
