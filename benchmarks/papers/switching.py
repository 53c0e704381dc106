"""PAT beside static TP degrees at the points of its evaluation, what its parts bring, and why.

    static    each TP degree that fits, throughout: veRL, of which the best is taken (5.1)
    PAT       Algorithm 1 from a base of TP 2, as in Fig. 12 and 14, and from the best static one

Everything is the mean over five steps, as in section 5.1. Deviation: PAT takes lengths from history
where the paper takes the maximum (`engines.pat.remaining`); the ablation has both.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, NamedTuple

from benchmarks.papers.generate import TraceSpec, generate
from benchmarks.papers.pat import GROUP_SIZE, STEPS, TP_DEGREES, Kv, Machine
from benchmarks.papers.real_run import bare_plan
from benchmarks.papers.scene import Scene, SceneRun, run_scene
from engines.control.techniques import StepInputs
from engines.pat.layouts import plan_pools
from engines.simulate.lengths import TraceLengths
from engines.simulate.run_config import run_config
from engines.simulate.trace import Trace

GPUS_PER_NODE = 8
REPORT_S = 2.0
"""How often virtual engines tell how far their requests are: 100 to 600 tokens each."""
PRINTED_BASE = 2
"""TP degree that the paper switches from (Fig. 12, 14) and that its printed times are those of."""
Lengths = Literal["exact", "history", "maximum"]
Opening = Literal["best", "base"]


@dataclass(frozen=True, slots=True)
class SwitchingVariant:
    """A way to switch."""

    name: str = "PAT"
    lengths: Lengths = "history"
    """How long responses are taken to go on; exactly, as nobody can know."""
    waits: bool = True
    """A switch now is weighed against a later one; not so in the paper."""
    kv: Kv = "auto"
    max_switches: float = math.inf
    free: bool = False
    """Switches take no time."""
    opening: Opening = "best"
    """TP degree in which a step begins; the base in the paper."""


PAT = SwitchingVariant()


@dataclass(frozen=True, slots=True)
class Runs:
    """The same on every step."""

    runs: tuple[SceneRun, ...]

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
        moved = [switch.move.move_kv for run in self.runs for switch in run.switches]
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
        scenes = (self.scene(step, tp_degree, higher=()) for step in self.steps)
        return Runs(tuple(run_scene(scene) for scene in scenes))

    def switched(self, base: int, variant: SwitchingVariant = PAT) -> Runs:
        """The layout in which a step begins stays until another one pays: before the first one
        there were some like it."""
        scenes = [self.scene(step, base, variant) for step in self.steps]
        runs, last = [], scenes[0].settled() if variant.opening == "best" else scenes[0]
        for scene in scenes:
            begun = replace(scene, pools=last.pools, missed_savings=last.missed_savings)
            runs.append(run_scene(begun, begun.policies(), variant.max_switches))
            last = begun.after(runs[-1])
        return Runs(tuple(runs))

    def scene(
        self,
        step: int,
        base: int,
        variant: SwitchingVariant = PAT,
        higher: tuple[int, ...] | None = None,
    ) -> Scene:
        """A step from this TP degree; `higher`: those that may be switched to, None for all."""
        machine, rows = self.machine, self.trace.step(step)
        higher = tuple(tp for tp in TP_DEGREES if tp > base) if higher is None else higher
        num_engines = machine.point.num_gpus // base
        pools, specs = plan_pools(num_engines, base, higher, GPUS_PER_NODE)
        costs = machine.costs(variant.kv)
        if variant.free:
            costs = replace(costs, link_bytes_per_s=math.inf, wake_s=0.0)
        keys = rows.table["prompt_key"].unique().to_pylist()
        return Scene(
            config=run_config(
                machine.point.max_tokens,
                rollout={"num_engines": num_engines, "tp_degree": base, "group_size": GROUP_SIZE},
                pat={"tp_degrees": higher},
            ),
            rows=rows,
            latency=machine.latency,
            tp_degrees={spec.engine: spec.tp_degree for spec in specs},
            pools=pools,
            costs=costs,
            lengths=TraceLengths(self.trace).before(step, keys),
            inputs=StepInputs(plan=bare_plan(step, keys, GROUP_SIZE)),
            kv_capacity_tokens={
                tp: machine.latency.kv_capacity_tokens(tp) for tp in (base, *higher)
            },
            report_s=REPORT_S,
            exact=variant.lengths == "exact",
            by_maximum=variant.lengths == "maximum",
            waits=variant.waits,
            opens=variant.opening == "best",
        )


class SwitchingGain(NamedTuple):
    """Gain of PAT over a static TP degree."""

    reduction: float
    """Share of generation that it saves."""
    speedup: float
    """Speed-up of an iteration."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """PAT and static TP degrees on the same responses."""

    steps: Steps
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
    def over_best(self) -> SwitchingGain:
        """Gain of PAT at its best over the best static TP degree."""
        return self._gain(self.best_static, self.pat[self.best_base])

    @property
    def over_printed(self) -> SwitchingGain:
        """Gain of PAT from the printed base over that TP degree throughout."""
        return self.over_base(self.pat[PRINTED_BASE])

    def over_base(self, runs: Runs) -> SwitchingGain:
        """Gain of these runs over the printed base throughout."""
        return self._gain(PRINTED_BASE, runs)

    def _gain(self, static: int, runs: Runs) -> SwitchingGain:
        static_s, pat_s = self.static[static].seconds, runs.seconds
        rest_s = self.steps.machine.point.rest_s(self.steps.num_tokens)
        return SwitchingGain(1 - pat_s / static_s, (static_s + rest_s) / (pat_s + rest_s))


def compare(steps: Steps) -> Comparison:
    """Each static TP degree; PAT among the printed base and higher ones, and from the best static
    one where that is lower."""
    static = {tp: steps.static(tp) for tp in TP_DEGREES if steps.machine.fits(tp)}
    best = min(static, key=lambda tp_degree: static[tp_degree].seconds)
    pat = {base: steps.switched(base) for base in sorted({PRINTED_BASE, min(PRINTED_BASE, best)})}
    return Comparison(steps, static, pat)


def uniform_switches(steps: Steps) -> int:
    """Switches where all responses have one length, from where PAT begins."""
    found = compare(steps)
    return sum(len(run.switches) for run in found.pat[found.best_base].runs)


def _slowest_pool_s(run: SceneRun) -> float:
    pools = range(len(run.scene.pools))
    taken_s = (sum(s.seconds for s in run.switches if s.move.pool == pool) for pool in pools)
    return max(taken_s, default=0.0)
