"""PAT at every point of its evaluation, what its parts bring, what that rests on, and how good its
forecasts are (section 5.5)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any, get_args

from benchmarks.papers.generate import TraceSpec
from benchmarks.papers.pat import FITTED, STEPS, Machine, Point, lengths, machine, uniform
from benchmarks.papers.pat_printed import printed_rows
from benchmarks.papers.scene import Scene, run_scene
from benchmarks.papers.switching import (
    PAT,
    PRINTED_BASE,
    REPORT_S,
    Comparison,
    Lengths,
    Runs,
    Steps,
    SwitchingVariant,
    compare,
    uniform_switches,
)
from benchmarks.papers.uneven_layouts import UnevenRow, study_uneven
from engines.latency.forecast import Unfinished, finish_s
from engines.latency.hardware import H100
from engines.pat.remaining import Remaining
from engines.rollout.moves import EngineView, Move, RolloutView

Progress = Callable[[str], None]
Rows = Sequence[dict[str, Any]]
PRESET = {name: getattr(H100, name) for name in FITTED["H100"]}
PAPER = SwitchingVariant("all three (paper)", opening="base", lengths="maximum", waits=False)
BOUND = SwitchingVariant("lengths known, free switches", lengths="exact", free=True)
"""Variant that no controller can do much better than."""
ABLATION = (
    SwitchingVariant("begins in TP 2", opening="base"),
    SwitchingVariant("now or never", opening="base", waits=False),
    SwitchingVariant("maximum lengths", opening="base", lengths="maximum"),
    PAPER,
    SwitchingVariant("lengths known", lengths="exact"),
    SwitchingVariant("always move", kv="move"),
    SwitchingVariant("always recompute", kv="recompute"),
    SwitchingVariant("one switch", max_switches=1),
    SwitchingVariant("free switches", free=True),
    BOUND,
)
FORECAST_TP_DEGREES = (2, 8)
"""Those of Fig. 14."""
LEAST_LEFT = 0.05
"""Share of a step that is left at the last forecast that counts."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something else where a setting is assumed."""

    name: str
    tokens: float = 1.0
    """Times those of a step."""
    responses: int = 1
    """Times those of a step."""
    runaways: int = 1
    """Responses of the maximum length."""
    hardware: Mapping[str, float] = field(default_factory=dict)
    """Changed figures by field of `Hardware`."""
    control_s: float | None = None
    """Seconds of a switch beside keys and values; None: as assumed."""

    def spec(self, point: Point) -> TraceSpec:
        spec = lengths(point)
        return spec.model_copy(
            update={
                "prompts_per_step": self.responses * spec.prompts_per_step,
                "num_prompts": self.responses * spec.num_prompts,
                "first_mean_tokens": self.tokens * spec.first_mean_tokens,
                "last_mean_tokens": self.tokens * spec.last_mean_tokens,
                "runaways_per_step": self.runaways,
            }
        )

    def machine(self, point: Point) -> Machine:
        return machine(point, self.hardware, self.control_s)


CHANGES = (
    Change("as assumed"),
    Change("half the tokens", tokens=0.5),
    Change("twice the tokens", tokens=2.0),
    Change("no response of the maximum", runaways=0),
    Change("4 responses of the maximum", runaways=4),
    Change("by data sheet, nothing fitted", hardware=PRESET),
    Change("4 ms of overhead a step", hardware={"step_overhead_s": 4e-3}),
    Change("switches of 0.3 s", control_s=0.3),
)
MAP = tuple(
    Change(
        f"{host_us} us of host, {128 * times} responses, {hop_us} us a hop",
        responses=times,
        hardware={"request_s": 1e-6 * host_us, "hop_s": 1e-6 * hop_us, "collective_s": 0.0},
    )
    for host_us, times, hop_us in product((0, 50, 200), (1, 4), (0.5, 5))
)
"""Changes by host time, responses and hop time, among which a reader's GPUs are."""


@dataclass(frozen=True, slots=True)
class SwitchingStudy:
    """All that was simulated."""

    best: Point
    """Point at which the paper gains the most."""
    points: Mapping[Point, Comparison]
    ablation: Mapping[tuple[Point, SwitchingVariant], Runs]
    """Variants from the printed base."""
    sensitivity: Mapping[str, Comparison]
    """Comparisons of the best point, by change."""
    forecasts: Mapping[tuple[Point, int, Lengths], float]
    """Errors of forecasts of the seconds left by point, static TP degree and what is known of
    lengths: means of |forecast - simulated| / simulated."""
    uniform_switches: int
    uneven: tuple[UnevenRow, ...]
    """Layouts of several TP degrees at once, beside those of one."""
    printed: Rows
    """How far the model is from each printed time, and bounds by what is printed alone."""


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """Plan of what is to be simulated."""

    points: tuple[Point, ...]
    best: Point
    parts: tuple[Point, ...]
    """Points at which parts are taken away."""
    changes: tuple[Change, ...] = (*CHANGES, *MAP)
    steps: tuple[int, ...] = STEPS


def study_switching(plan: StudyPlan, seed: int, progress: Progress) -> SwitchingStudy:
    """`progress` is told what is simulated now."""
    points = {}
    for point in plan.points:
        progress(point.name)
        points[point] = compare(Steps.draw(machine(point), lengths(point), seed, plan.steps))
    parts = [(point, points[point]) for point in plan.parts]
    return SwitchingStudy(
        best=plan.best,
        points=points,
        ablation={key: runs for part in parts for key, runs in _ablate(*part, progress)},
        sensitivity=dict(_vary(plan, seed, progress)),
        forecasts={key: error for part in parts for key, error in _forecasts(*part, progress)},
        uniform_switches=sum(
            uniform_switches(Steps.draw(machine(point), uniform(point), seed, plan.steps[:2]))
            for point in plan.parts
        ),
        uneven=tuple(row for part in parts for row in _uneven(*part, progress)),
        printed=printed_rows(),
    )


def _ablate(
    point: Point, comparison: Comparison, progress: Progress
) -> Iterator[tuple[tuple[Point, SwitchingVariant], Runs]]:
    yield (point, PAT), comparison.pat[PRINTED_BASE]
    for variant in ABLATION:
        progress(f"{point.name}, {variant.name}")
        yield (point, variant), comparison.steps.switched(PRINTED_BASE, variant)


def _uneven(point: Point, comparison: Comparison, progress: Progress) -> Iterator[UnevenRow]:
    progress(f"{point.name}, uneven layouts")
    yield from study_uneven(comparison.steps)


def _vary(plan: StudyPlan, seed: int, progress: Progress) -> Iterator[tuple[str, Comparison]]:
    """Comparisons under each change, on the first of the steps alone."""
    for change in plan.changes:
        progress(change.name)
        spec = change.spec(plan.best)
        steps = Steps.draw(change.machine(plan.best), spec, seed, plan.steps[:1])
        yield change.name, compare(steps)


@dataclass(frozen=True, slots=True)
class LoggedForecasts:
    """Forecasts at every event how long is left, and decides nothing."""

    scene: Scene
    remaining: Remaining
    made: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the beginning, seconds left)."""

    def decide(self, view: RolloutView) -> list[Move]:
        left_s = max(map(self._left_s, view.engines), default=0.0)
        self.made.append((view.elapsed_s, left_s))
        return []

    def _left_s(self, engine: EngineView) -> float:
        remaining = self.remaining.tokens(engine.progress)
        requests = [
            Unfinished(self.scene.prompt_tokens[id.prompt_key] + num, remaining[id])
            for id, num in engine.progress.items()
        ]
        return finish_s(self.scene.latency, self.scene.config.rollout.tp_degree, requests)


def _forecasts(
    point: Point, comparison: Comparison, progress: Progress
) -> Iterator[tuple[tuple[Point, int, Lengths], float]]:
    steps = comparison.steps
    for tp_degree, kind in product(FORECAST_TP_DEGREES, get_args(Lengths)):
        progress(f"{point.name}, forecasts at TP {tp_degree}, {kind} lengths")
        variant = SwitchingVariant(lengths=kind)
        scenes = (steps.scene(step, tp_degree, variant, higher=()) for step in steps.steps)
        yield (point, tp_degree, kind), fmean(map(forecast_error, scenes))


def forecast_error(scene: Scene) -> float:
    """Mean over the events of a step with one TP degree throughout, without bound on KV caches."""
    forecaster = LoggedForecasts(scene, scene.remaining())
    unbound = replace(scene, kv_capacity_tokens={}, report_s=5 * REPORT_S)
    step_s = run_scene(unbound, (forecaster,)).step_s
    made = [
        (at_s, left_s) for at_s, left_s in forecaster.made if step_s - at_s > LEAST_LEFT * step_s
    ]
    return fmean(abs(left_s / (step_s - at_s) - 1) for at_s, left_s in made)
