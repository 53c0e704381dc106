"""One step with every technique by itself, and with all of them under one controller.

    the same requests ─┬─ left alone
                       ├─ reshape, redraft, race, spread: a controller of one technique each
                       ├─ each paper's own policy, beside them
                       └─ joint: one controller of them all

In virtual time, by the real coordinator. Everything that a controller is told is known when a step
begins: lengths of the epoch before, prompts, what drafters do on average.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.papers.pools import switch_times
from engines.control.controller import Controller, Decision
from engines.control.effects import Effects
from engines.control.moving import Racing, Spreading
from engines.control.objective import Objective, SoonestEnd
from engines.control.outlook import Outlook
from engines.control.proposal import Technique
from engines.control.redrafting import Redrafting
from engines.control.reshaping import Reshaping
from engines.control.state import Forecaster
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.pat.remaining import Remaining
from engines.rollout.moves import Policy
from engines.rollout.stage import Outcome
from engines.simulate.batching import Interval
from engines.simulate.clock import run_virtual
from engines.simulate.cluster import PolicySet, even, roll_out, step_requests
from engines.simulate.engine import VirtualEngine
from engines.simulate.member import Acceptance
from engines.simulate.trace import Trace
from engines.specactor.best_of_n import BestOfN
from schemas.layout import Pool
from schemas.rollout import DraftSetting, RequestId, Rollout

NOTHING, JOINT = "nothing", "joint"
RESHAPE, REDRAFT, RACE, SPREAD = "reshape", "redraft", "race", "spread"
TECHNIQUES = (RESHAPE, REDRAFT, RACE, SPREAD)
"""That a controller may have, alone or together."""


@dataclass(frozen=True)
class Drafters:
    """What may be drafted with in a scene."""

    acceptances: Mapping[RequestId, Acceptance]
    """Of each request, by drafter; what happens."""
    expected: Mapping[str, float]
    """By drafter, on average; what is known of it."""
    methods: Sequence[DraftSetting]
    """To race with."""
    modes: Sequence[bool] = (True,)
    """Of `DraftSetting.coupled`."""
    initial: DraftSetting | None = None
    """With which all begin; None: with none."""
    hope: float = 0.0
    """Of a race, on the scale of logits (`Effects.hope`)."""
    max_raced: int = 8
    """Copies on a freed engine (b_max)."""

    @property
    def begins_with(self) -> str | None:
        return self.initial.drafter if self.initial else None


@dataclass(frozen=True)
class Scene:
    """A step of some paper's setting: requests, engines, and what is known."""

    rows: Trace
    latency: Latency
    num_engines: int
    """Of the base."""
    tp_degrees: Mapping[int, int]
    """Of every engine by index, those on standby too."""
    pools: tuple[Pool, ...]
    costs: SwitchCosts
    remaining: Remaining
    drafters: Drafters | None = None
    kv_capacity_tokens: Mapping[int, int] = field(default_factory=dict)
    """Of one engine, by TP degree; without bound where it is not given."""
    max_num_seqs: int = 256
    report_s: float = 1.0
    """How often virtual engines tell how far they are."""
    every_s: float = 2.0
    """Between two rounds of a controller, at most."""
    least_s: float = 0.0
    """At least."""
    max_batch: int = 128
    """Engines with more requests are not looked at."""

    @property
    def prompt_tokens(self) -> dict[str, int]:
        columns = ("prompt_key", "prompt_tokens")
        keys, tokens = (self.rows.table[column].to_pylist() for column in columns)
        return dict(zip(keys, tokens, strict=True))


@dataclass(frozen=True)
class JointRun:
    """A scene, simulated with some techniques."""

    name: str
    step_s: float
    rollouts: tuple[Rollout, ...]
    timelines: Mapping[int, Sequence[Interval]]
    outcome: Outcome
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class JointRow:
    """A setting with one technique, with all, or with none."""

    setting: str
    technique: str
    seconds: float
    speedup: float
    """Over nothing."""
    over_best_single: float | None
    """Of the joint controller, over the fastest of the others."""


def rows_of(setting: str, seconds: Mapping[str, float]) -> list[JointRow]:
    """`seconds`: by technique, of the same work."""
    best_s = min(own_s for name, own_s in seconds.items() if name not in (NOTHING, JOINT))
    return [
        JointRow(
            setting,
            name,
            own_s,
            seconds[NOTHING] / own_s,
            best_s / own_s if name == JOINT else None,
        )
        for name, own_s in seconds.items()
    ]


def run_technique(scene: Scene, name: str) -> JointRun:
    """With nothing, one technique, or all of them (`JOINT`)."""
    names = TECHNIQUES if name == JOINT else () if name == NOTHING else (name,)
    controller = control(scene, techniques(scene, names)) if names else None
    run = run_policies(scene, name, (controller,) if controller else ())
    return replace(run, decisions=tuple(controller.decisions) if controller else ())


def run_policies(scene: Scene, name: str, policies: Sequence[Policy]) -> JointRun:
    """Deterministic."""
    requests, lengths = step_requests(scene.rows, scene.rows.steps[0])
    drafters = scene.drafters
    engines = [
        VirtualEngine(
            index,
            tp_degree,
            scene.latency,
            lengths,
            acceptances=drafters.acceptances if drafters else None,
            max_num_seqs=scene.max_num_seqs,
            max_context_tokens=scene.kv_capacity_tokens.get(tp_degree),
            report_s=scene.report_s if policies else None,
            switch=switch_times(scene.costs, tp_degree),
        )
        for index, tp_degree in sorted(scene.tp_degrees.items())
    ]
    initial = drafters.initial if drafters else None
    policy_set = PolicySet(name=name, policies=tuple(policies), drafting=initial)
    groups = even(list(requests), {}, scene.num_engines)
    placed = [(g.engine, request) for g in groups for request in requests[g.prompt_key]]
    rollouts, outcome = run_virtual(roll_out(engines, policy_set, placed, scene.pools))
    assert len(rollouts) == len(lengths) == len({r.request.id for r in rollouts})
    return JointRun(
        name=name,
        step_s=rollouts[-1].finished_s,
        rollouts=tuple(rollouts),
        timelines={engine.index: engine.intervals for engine in engines},
        outcome=outcome,
    )


def control(
    scene: Scene, techniques: Sequence[Technique], objective: Objective | None = None
) -> Controller:
    """A controller that knows what may be known in this scene."""
    drafters = scene.drafters
    outlook = Outlook(
        Forecaster(scene.latency, scene.max_num_seqs),
        scene.remaining,
        scene.prompt_tokens,
        expected_acceptance=drafters.expected if drafters else {},
        default_drafting=drafters.initial if drafters else None,
    )
    pools = {pool.index: pool for pool in scene.pools}
    hope = drafters.hope if drafters else 0.0
    effects = Effects(scene.latency, pools, scene.costs, hope=hope)
    return Controller(
        techniques,
        outlook,
        effects,
        objective or SoonestEnd(),
        every_s=scene.every_s,
        least_s=scene.least_s,
        max_batch=scene.max_batch,
        max_requests=math.inf,
    )


def techniques(scene: Scene, names: Sequence[str]) -> list[Technique]:
    """Those of these names that the scene has a use for."""
    redrafting = _redrafting(scene) if REDRAFT in names else None
    makers: dict[str, Callable[[], Technique | None]] = {
        RESHAPE: lambda: Reshaping(redrafting) if scene.pools else None,
        REDRAFT: lambda: redrafting,
        RACE: lambda: _racing(scene),
        SPREAD: Spreading,
    }
    made = (makers[name]() for name in names)
    return [technique for technique in made if technique]


def _redrafting(scene: Scene) -> Redrafting | None:
    drafters = scene.drafters
    if drafters is None:
        return None
    begun = drafters.initial is not None
    return Redrafting(
        scene.latency,
        drafters=() if begun else tuple(drafters.expected),
        modes=drafters.modes,
    )


def _racing(scene: Scene) -> Racing | None:
    drafters = scene.drafters
    if drafters is None:
        return None
    best_of_n = BestOfN(
        drafters.methods, initial=drafters.begins_with, max_batch=drafters.max_raced
    )
    return Racing(best_of_n)
