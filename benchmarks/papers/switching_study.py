"""PAT at every point of its evaluation, what its parts bring, what that rests on, and how good its
forecasts are (section 5.5)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

from benchmarks.papers.generate import TraceSpec
from benchmarks.papers.pat import (
    STEPS,
    Machine,
    Point,
    lengths,
    machine,
    other_machine,
    uniform,
)
from benchmarks.papers.pools import REPORT_S
from benchmarks.papers.switching import (
    PAT,
    PRINTED_BASE,
    Comparison,
    Lengths,
    Runs,
    Steps,
    SwitchingVariant,
    compare,
    uniform_switches,
)
from engines.latency.forecast import Unfinished, finish_s
from engines.latency.interface import Latency
from engines.pat.remaining import Remaining
from engines.rollout.moves import EngineView, Move, RolloutView
from engines.simulate.cluster import PolicySet, simulate_step
from schemas.simulate import ClusterLayout

Progress = Callable[[str], None]
ABLATION = (
    PAT,
    SwitchingVariant("now or never", waits=False),
    SwitchingVariant("maximum lengths", lengths="maximum"),
    SwitchingVariant("both (paper)", lengths="maximum", waits=False),
    SwitchingVariant("lengths known", lengths="exact"),
    SwitchingVariant("always move", kv="move"),
    SwitchingVariant("always recompute", kv="recompute"),
    SwitchingVariant("one switch", max_switches=1),
    SwitchingVariant("free switches", free=True),
)
FORECAST_TP_DEGREES = (2, 8)
"""Those of Fig. 14."""
LEAST_LEFT = 0.05
"""Share of a step that is left at the last forecast that counts."""


@dataclass(frozen=True, slots=True)
class SwitchingRow:
    """A variant from the printed base."""

    point: Point
    variant: SwitchingVariant
    runs: Runs
    over_pat: float
    """Seconds over those of PAT as it is by default."""


@dataclass(frozen=True, slots=True)
class Change:
    """Something else where a setting is assumed."""

    name: str
    tokens: float = 1.0
    """Times those of a step."""
    responses: int = 1
    """Times those of a step."""
    runaways: int | None = None
    """Responses of the maximum length; None: as many as there are."""
    hardware: Mapping[str, float] = field(default_factory=dict)
    """Changed figures by field of `Hardware`."""
    request_s: float = 0.0
    """Seconds of the host for each request of a step."""
    control_s: float | None = None
    """Seconds of a switch beside keys and values."""

    def spec(self, point: Point) -> TraceSpec:
        spec = lengths(point)
        return spec.model_copy(
            update={
                "prompts_per_step": self.responses * spec.prompts_per_step,
                "num_prompts": self.responses * spec.num_prompts,
                "first_mean_tokens": self.tokens * spec.first_mean_tokens,
                "last_mean_tokens": self.tokens * spec.last_mean_tokens,
                "runaways_per_step": spec.runaways_per_step
                if self.runaways is None
                else self.runaways,
            }
        )

    def machine(self, point: Point) -> Machine:
        control_s = {} if self.control_s is None else {"control_s": self.control_s}
        return other_machine(point, self.hardware, self.request_s, **control_s)


CHANGES = (
    Change("as assumed"),
    Change("half the tokens", tokens=0.5),
    Change("twice the tokens", tokens=2.0),
    Change("256 responses", responses=2),
    Change("512 responses", responses=4),
    Change("no response of the maximum", runaways=0),
    Change("4 responses of the maximum", runaways=4),
    Change("1 ms of overhead a step", hardware={"step_overhead_s": 1e-3}),
    Change("4 ms of overhead a step", hardware={"step_overhead_s": 4e-3}),
    Change("all-reduces with A40's hops", hardware={"hop_s": 5e-6}),
    Change("100 us of host a request", request_s=100e-6),
    Change("300 us of host a request", request_s=300e-6),
    Change("switches of 0.3 s", control_s=0.3),
)


@dataclass(frozen=True, slots=True)
class ForecastError:
    """Error of the remaining seconds with a static TP degree."""

    point: Point
    tp_degree: int
    lengths: Lengths
    error: float
    """Mean of |forecast - simulated| / simulated."""


@dataclass(frozen=True, slots=True)
class SwitchingStudy:
    """All that was simulated."""

    best: Point
    """Point at which the paper gains the most."""
    points: Mapping[Point, Comparison]
    ablation: tuple[SwitchingRow, ...]
    sensitivity: Mapping[str, Comparison]
    """Comparisons of the best point, by change."""
    forecasts: tuple[ForecastError, ...]
    uniform_switches: int


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """Plan of what is to be simulated."""

    points: tuple[Point, ...]
    best: Point
    parts: tuple[Point, ...]
    """Points at which parts are taken away."""
    changes: tuple[Change, ...] = CHANGES
    steps: tuple[int, ...] = STEPS


def study_switching(plan: StudyPlan, seed: int, progress: Progress) -> SwitchingStudy:
    """`progress` is told what is simulated now."""
    drawn = {point: _draw(point, seed, plan.steps) for point in plan.points}
    points = {}
    for point, steps in drawn.items():
        progress(point.name)
        points[point] = compare(point.name, steps)
    parts = [(point, points[point]) for point in plan.parts]
    return SwitchingStudy(
        best=plan.best,
        points=points,
        ablation=tuple(row for part in parts for row in _ablate(*part, progress)),
        sensitivity=dict(_vary(plan, seed, progress)),
        forecasts=tuple(error for part in parts for error in _forecasts(*part, progress)),
        uniform_switches=sum(
            uniform_switches(Steps.draw(machine(point), uniform(point), seed, plan.steps[:2]))
            for point in plan.parts
        ),
    )


def _draw(point: Point, seed: int, steps: Sequence[int]) -> Steps:
    return Steps.draw(machine(point), lengths(point), seed, steps)


def _ablate(point: Point, comparison: Comparison, progress: Progress) -> Iterator[SwitchingRow]:
    pat = comparison.pat[PRINTED_BASE]
    for variant in ABLATION:
        progress(f"{point.name}, {variant.name}")
        steps = comparison.steps
        runs = pat if variant == PAT else steps.switched(PRINTED_BASE, variant)
        yield SwitchingRow(point, variant, runs, runs.seconds / pat.seconds)


def _vary(plan: StudyPlan, seed: int, progress: Progress) -> Iterator[tuple[str, Comparison]]:
    """Comparisons under each change, on the first of the steps alone."""
    for change in plan.changes:
        progress(change.name)
        machine, spec = change.machine(plan.best), change.spec(plan.best)
        yield change.name, compare(change.name, Steps.draw(machine, spec, seed, plan.steps[:1]))


@dataclass(frozen=True, slots=True)
class LoggedForecasts:
    """Forecasts at every event how long is left, and decides nothing."""

    latency: Latency
    tp_degree: int
    remaining: Remaining
    prompt_tokens: Mapping[str, int]
    made: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the beginning, seconds left)."""

    def decide(self, view: RolloutView) -> list[Move]:
        left_s = max(map(self._left_s, view.engines), default=0.0)
        self.made.append((view.elapsed_s, left_s))
        return []

    def _left_s(self, engine: EngineView) -> float:
        remaining = self.remaining.tokens(engine.progress)
        requests = [
            Unfinished(self.prompt_tokens[id.prompt_key] + num, remaining[id])
            for id, num in engine.progress.items()
        ]
        return finish_s(self.latency, self.tp_degree, requests)


def _forecasts(point: Point, comparison: Comparison, progress: Progress) -> Iterator[ForecastError]:
    kinds: tuple[Lengths, ...] = ("exact", "history", "maximum")
    for tp_degree in FORECAST_TP_DEGREES:
        for kind in kinds:
            progress(f"{point.name}, forecasts at TP {tp_degree}, {kind} lengths")
            error = partial(forecast_error, comparison.steps, tp_degree, kind)
            yield ForecastError(point, tp_degree, kind, fmean(map(error, comparison.steps.steps)))


def forecast_error(steps: Steps, tp_degree: int, kind: Lengths, step: int) -> float:
    """Mean over the events of a step with this TP degree throughout."""
    latency, point = steps.machine.latency, steps.machine.point
    forecaster = LoggedForecasts(
        latency, tp_degree, steps.remaining(step, kind), steps.prompt_tokens(step)
    )
    layout = ClusterLayout(num_engines=point.num_gpus // tp_degree, tp_degree=tp_degree)
    policies = PolicySet(policies=(forecaster,), report_s=5 * REPORT_S)
    step_s = simulate_step(steps.trace.step(step), layout, latency, policies).step.step_s
    made = [
        (at_s, left_s) for at_s, left_s in forecaster.made if step_s - at_s > LEAST_LEFT * step_s
    ]
    return fmean(abs(left_s / (step_s - at_s) - 1) for at_s, left_s in made)
