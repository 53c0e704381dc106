"""PAT beside static TP degrees at the points of its evaluation.

    static    each TP degree that fits, throughout: veRL. The paper compares with the best (5.1)
    PAT       Algorithm 1 from a base of TP 2, as in Fig. 12 and 14, and from the best static degree

All seconds are means over five steps, as in 5.1. Deviation: PAT takes lengths from history where
the paper takes the maximum (`engines.pat.remaining`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from refrain.benchmarks.papers.generate import TraceSpec, generate
from refrain.benchmarks.papers.pat import (
    GROUP_SIZE,
    STEPS,
    TP_DEGREES,
    Machine,
    Point,
    lengths,
    machine,
)
from refrain.benchmarks.papers.real_run import bare_plan
from refrain.benchmarks.papers.scene import Scene, SceneRun, run_scene
from refrain.engines.control.techniques import StepInputs
from refrain.engines.pat.layouts import plan_pools
from refrain.engines.simulate.lengths import TraceLengths
from refrain.engines.simulate.run_config import run_config
from refrain.engines.simulate.trace import Trace

GPUS_PER_NODE = 8
REPORT_S = 2.0
"""Seconds between two reports of an engine: 100 to 600 tokens of each request."""
PRINTED_BASE = 2
"""TP degree from which the paper switches (Fig. 12, 14). Its printed times are those of TP 2."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The same way to switch, on every step."""

    runs: tuple[SceneRun, ...]

    @property
    def seconds(self) -> float:
        return fmean(run.step_s for run in self.runs)

    @property
    def num_switches(self) -> float:
        """Switches in a step, of all pools."""
        return fmean(len(run.switches) for run in self.runs)


@dataclass(frozen=True, slots=True)
class Steps:
    """Responses of a point, and those of the epoch before."""

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

    def switched(self, base: int) -> Runs:
        """Run PAT. A step begins in the layout of the step before, unless another one pays."""
        scenes = [self.scene(step, base) for step in self.steps]
        runs, last = [], scenes[0].settled()
        for scene in scenes:
            begun = replace(scene, pools=last.pools, missed_savings=last.missed_savings)
            runs.append(run_scene(begun, begun.policies()))
            last = begun.after(runs[-1])
        return Runs(tuple(runs))

    def scene(self, step: int, base: int, higher: tuple[int, ...] | None = None) -> Scene:
        """Return a step that begins at TP `base` and may switch to `higher`. None: all above."""
        on, rows = self.machine, self.trace.step(step)
        higher = tuple(tp for tp in TP_DEGREES if tp > base) if higher is None else higher
        num_engines = on.point.num_gpus // base
        pools, specs = plan_pools(num_engines, base, higher, GPUS_PER_NODE)
        keys = rows.table["prompt_key"].unique().to_pylist()
        return Scene(
            config=run_config(
                on.point.max_tokens,
                rollout={"num_engines": num_engines, "tp_degree": base, "group_size": GROUP_SIZE},
                pat={"tp_degrees": higher},
            ),
            rows=rows,
            latency=on.latency,
            tp_degrees={spec.engine: spec.tp_degree for spec in specs},
            pools=pools,
            costs=on.costs(),
            lengths=TraceLengths(self.trace).before(step, keys),
            inputs=StepInputs(plan=bare_plan(step, keys, GROUP_SIZE)),
            kv_capacity_tokens={tp: on.latency.kv_capacity_tokens(tp) for tp in (base, *higher)},
            report_s=REPORT_S,
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
    """Runs by static TP degree that fits."""
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
        return self._gain(PRINTED_BASE, self.pat[PRINTED_BASE])

    def _gain(self, static: int, runs: Runs) -> SwitchingGain:
        static_s, pat_s = self.static[static].seconds, runs.seconds
        rest_s = self.steps.machine.point.rest_s(self.steps.num_tokens)
        return SwitchingGain(1 - pat_s / static_s, (static_s + rest_s) / (pat_s + rest_s))


def compare(steps: Steps) -> Comparison:
    """Run each static TP degree, and PAT from the printed base. If a lower static degree is the
    best, run PAT from there too."""
    static = {tp: steps.static(tp) for tp in TP_DEGREES if steps.machine.fits(tp)}
    best = min(static, key=lambda tp_degree: static[tp_degree].seconds)
    pat = {base: steps.switched(base) for base in sorted({PRINTED_BASE, min(PRINTED_BASE, best)})}
    return Comparison(steps, static, pat)


def compare_points(
    points: Sequence[Point], steps: Sequence[int], seed: int, progress: Callable[[str], None]
) -> dict[Point, Comparison]:
    """Compare at each point. `progress` gets its name first."""
    found = {}
    for point in points:
        progress(point.name)
        found[point] = compare(Steps.draw(machine(point), lengths(point), seed, steps))
    return found
