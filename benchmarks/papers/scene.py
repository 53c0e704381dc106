"""One step on virtual engines in a paper's setting, by the real coordinator and policies.

    base layout, e.g. 4 engines of TP 2 ─► withdrawn, keys and values saved ─► 1 engine of TP 8
                                             └ step in progress, save_s         └ wake_s, load_s

A node is a pool. Its engines of every TP degree are there from the start, those of higher ones
parked; their weights are current, so that a switch loads none. The policies are put together as in
a real run (`engines.control.techniques`). All that they are told is known when a step begins:
lengths of the epoch before, prompts, what drafters do on average.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from benchmarks.papers.real_run import ALL, HISTOPIPE, asked_seldom, only, switched_on
from benchmarks.papers.windows import TYPICAL, GatedHistory
from engines.control.reshaping import MissedSavings
from engines.control.techniques import (
    MoveModel,
    StepInputs,
    expected_lengths,
    plan_policies,
    tokens_to_come,
)
from engines.histopipe.placement import place_prompts, time_rollouts
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts
from engines.pat.remaining import Maximum, Remaining
from engines.rollout.moves import EngineView, FirstLayout, Move, Policy, Reshape, RolloutView
from engines.rollout.stage import Outcome
from engines.simulate.batching import Interval
from engines.simulate.clock import run_virtual
from engines.simulate.cluster import Placement, PolicySet, even, roll_out, step_requests
from engines.simulate.engine import SwitchTimes, VirtualEngine
from engines.simulate.member import Acceptance, Passes
from engines.simulate.trace import Trace
from schemas.config import TrainConfig
from schemas.layout import Pool
from schemas.rollout import LengthHistory, RequestId, Rollout, RolloutRequest
from schemas.step import PromptGroup

WARM_UP = 8
"""Steps before those that are measured: a change of where steps begin may pay after some alone."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Tokens that responses really have to come, as nobody can know; implements `Remaining`."""

    lengths: Mapping[RequestId, int]
    is_known = True

    def tokens(
        self, generated: Mapping[RequestId, int], scenario: float = 0.0
    ) -> dict[RequestId, float]:
        del scenario
        return {id: max(1.0, float(self.lengths[id] - num)) for id, num in generated.items()}


@dataclass(frozen=True)
class Scene:
    """A step of some paper's setting: requests, engines, and what is known."""

    config: TrainConfig
    """Config of a real run with all techniques that the scene has."""
    rows: Trace
    latency: Latency
    tp_degrees: Mapping[int, int]
    """TP degree of every engine by index, those on standby too."""
    pools: tuple[Pool, ...]
    costs: SwitchCosts
    """Costs of a switch, as they are predicted and as they are."""
    lengths: Mapping[str, LengthHistory]
    """Lengths of prompts in the epoch before."""
    inputs: StepInputs
    """Further things that a real run knows beforehand."""
    acceptances: Mapping[RequestId, Acceptance] | None = None
    """Acceptances of draft models; what happens."""
    drafts: Mapping[RequestId, Passes] | None = None
    """Acceptances of drafts from history; what happens. What engines and policies know of them is
    `windows.TYPICAL`."""
    kv_capacity_tokens: Mapping[int, int] = field(default_factory=dict)
    """KV-cache capacity of one engine in tokens, by TP degree; without bound where it is not
    given."""
    report_s: float = 1.0
    """How often virtual engines tell how far they are, and policies are asked at most."""
    placement: Placement | None = even
    """None: prompts are placed by `lengths`, as a run with the config does."""
    exact: bool = False
    """How long responses will be is known."""
    waits: bool = True
    opens: bool = True
    """As of `MoveModel`."""
    by_maximum: bool = False
    """Every response is taken to reach the limit, as with `pat.rule: paper`."""
    missed_savings: MissedSavings = field(default_factory=MissedSavings)
    """Missed savings, as of `MoveModel`; one object over all steps that follow each other."""

    @property
    def techniques(self) -> tuple[str, ...]:
        return (*switched_on(self.config), *([HISTOPIPE] if self.placement is None else []))

    def seconds(self, technique: str) -> float:
        """Seconds of the step with nothing, one technique, or all of them."""
        config, placement = only(self.config, technique), self.placement
        if placement is None and technique not in (HISTOPIPE, ALL):
            placement = even
        own = replace(self, config=config, placement=placement, missed_savings=MissedSavings())
        scene = own.settled() if own.config.pat.tp_degrees else own
        return run_scene(scene, asked_seldom(scene.policies(), scene.report_s)).step_s

    def settled(self) -> "Scene":
        """The same after some steps like it: its pools are where those have begun."""
        scene = self
        for _ in range(WARM_UP):
            queued: dict[int, dict[RequestId, int]] = {index: {} for index in scene.living}
            for index, request in scene.placed():
                queued[index][request.id] = 0
            engines = (EngineView(i, q, tp_degree=scene.tp_degrees[i]) for i, q in queued.items())
            view = RolloutView(0.0, tuple(engines), 0, len(scene.rows))
            moves = [
                m for p in scene.policies() if isinstance(p, FirstLayout) for m in p.begin(view)
            ]
            scene = scene.beginning({move.pool: move.tp_degree for move in moves})
        return scene

    def placed(self) -> list[tuple[int, RolloutRequest]]:
        """Requests with the engines that they begin on."""
        requests, _ = step_requests(self.rows, self.rows.steps[0])
        keys, num_engines = list(requests), len(self.living)
        if self.placement is None:
            groups = self._placed_by_history(keys, num_engines)
        else:
            medians = {key: known.median_tokens for key, known in self.lengths.items()}
            groups = self.placement(keys, medians, num_engines)
        return [(self.living[g.engine], r) for g in groups for r in requests[g.prompt_key]]

    def _placed_by_history(self, keys: Sequence[str], num_engines: int) -> Sequence[PromptGroup]:
        """A run has seen how many drafts a pass verifies; here it is a window."""
        drafting = self.inputs.plan.drafting
        rollout_time = time_rollouts(self.config, self.latency, drafting.window if drafting else 0)
        step = self.rows.steps[0]
        about = (keys, self.lengths, step, num_engines, rollout_time)
        return place_prompts(self.config, *about)[0].groups

    def free_switches(self) -> "Scene":
        """The same where a switch takes no time, and is known to take none."""
        return replace(self, costs=replace(self.costs, link_bytes_per_s=math.inf, wake_s=0.0))

    def best_opening_s(self) -> float:
        """Least seconds of the step with all techniques over the TP degrees in which pools may
        begin, and lengths known or not: which is the best, hindsight says."""
        begun = (
            replace(self, exact=exact, opens=False).beginning(
                {pool.index: degree for pool in self.pools}
            )
            for degree in self.pools[0].engines
            for exact in (False, True)
        )
        return min(
            run_scene(scene, asked_seldom(scene.policies(), scene.report_s)).step_s
            for scene in begun
        )

    def after(self, run: "SceneRun") -> "Scene":
        """The same with its pools as that step left them: they begin where it began."""
        return self.beginning(run.begun)

    def beginning(self, degrees: Mapping[int, int]) -> "Scene":
        """The same with these pools, by their index, in these TP degrees when it begins."""
        firsts = {pool.index: pool.first for pool in self.pools} | dict(degrees)
        pools = (replace(pool, first=firsts[pool.index]) for pool in self.pools)
        return replace(self, pools=tuple(pools))

    @property
    def living(self) -> tuple[int, ...]:
        """Engines that a step is planned with: of the layouts in which pools are."""
        off = {index for pool in self.pools for index in pool.standby}
        return tuple(index for index in sorted(self.tp_degrees) if index not in off)

    def policies(self) -> tuple[Policy, ...]:
        """Those of a real run with this config."""
        drafts = self.drafts and self.config.drafting.enabled
        model = MoveModel(
            latency=self.latency,
            costs=self.costs,
            pools=self.pools,
            missed_savings=self.missed_savings,
            remaining=self.remaining(),
            prompt_tokens=self.prompt_tokens,
            speculation=TYPICAL.speculation if drafts else (1.0, 0),
            waits=self.waits,
            opens=self.opens,
        )
        to_come = tokens_to_come(self.config, self.lengths)
        # Without a ladder no draft setting changes within the step.
        ladder = self.inputs.ladder if self.config.specactor.race else None
        inputs = replace(self.inputs, to_come=to_come, move_model=model, ladder=ladder)
        return plan_policies(self.config, inputs)

    def remaining(self) -> Remaining:
        """How long responses are taken to go on."""
        if self.exact:
            return Exact(step_requests(self.rows, self.rows.steps[0])[1])
        if self.by_maximum:
            return Maximum(self.config.data.max_response_tokens)
        return expected_lengths(self.config, self.lengths)

    @cached_property
    def prompt_tokens(self) -> dict[str, int]:
        columns = ("prompt_key", "prompt_tokens")
        keys, tokens = (self.rows.table[column].to_pylist() for column in columns)
        return dict(zip(keys, tokens, strict=True))


@dataclass(frozen=True, slots=True)
class Switch:
    """GPUs of a pool went over to another TP degree."""

    move: Reshape
    at_s: float
    """When it was decided, in seconds since the step began."""
    num_unfinished: int
    """Requests of the pool, then."""
    seconds: float = math.nan
    """Seconds from the decision to the first decoding step of the slowest engine there: the step in
    progress, saving, waking, loading or computing keys and values again."""


@dataclass(frozen=True, slots=True)
class SceneRun:
    """A scene, simulated, and what was decided in it."""

    scene: Scene
    step_s: float
    rollouts: tuple[Rollout, ...]
    """Rollouts in the order in which they finished."""
    timelines: Mapping[int, Sequence[Interval]]
    """When each engine was busy, by index."""
    outcome: Outcome
    switches: tuple[Switch, ...]
    begun: Mapping[int, int]
    """TP degree in which each pool began."""


class ObservedPolicy:
    """A policy whose switches are noted; some of them it may not make."""

    def __init__(self, policy: Policy, pools: Sequence[Pool], max_switches: float) -> None:
        """`max_switches`: of each pool; infinite for as many as pay."""
        self._policy, self._max_switches = policy, max_switches
        self._engines = {p.index: {e for of in p.engines.values() for e in of} for p in pools}
        self.made: list[Switch] = []
        self.begun: dict[int, int] = {}
        """TP degrees in which it had pools begin."""

    def begin(self, view: RolloutView) -> Sequence[Reshape]:
        moves = self._policy.begin(view) if isinstance(self._policy, FirstLayout) else ()
        self.begun |= {move.pool: move.tp_degree for move in moves}
        return moves

    def decide(self, view: RolloutView) -> list[Move]:
        moves = [move for move in self._policy.decide(view) if self._may(move)]
        self.made += [
            Switch(move, view.elapsed_s, self._num_unfinished(move.pool, view))
            for move in moves
            if isinstance(move, Reshape) and not self._waits(move)
        ]
        return moves

    def _waits(self, move: Reshape) -> bool:
        """Whether it is its pool's last switch again, which is made when copies are there."""
        own = [made.move.tp_degree for made in self.made if made.move.pool == move.pool]
        return own[-1:] == [move.tp_degree]

    def _may(self, move: Move) -> bool:
        if not isinstance(move, Reshape):
            return True
        return sum(made.move.pool == move.pool for made in self.made) < self._max_switches

    def _num_unfinished(self, pool: int, view: RolloutView) -> int:
        own = (engine for engine in view.engines if engine.engine in self._engines[pool])
        return len({id for engine in own for id in engine.progress})


def run_scene(
    scene: Scene, policies: Sequence[Policy] = (), max_switches: float = math.inf
) -> SceneRun:
    """Roll the step out; deterministic.

    Engines draft from history where the config does and that pays in their batch.
    """
    rollout = scene.config.rollout
    _, lengths = step_requests(scene.rows, scene.rows.steps[0])
    drafts = scene.drafts if scene.config.drafting.enabled else None
    gates = {
        tp: GatedHistory(scene.latency, tp, (TYPICAL.passes,)) if drafts else None
        for tp in set(scene.tp_degrees.values())
    }
    engines = [
        VirtualEngine(
            index,
            tp_degree,
            scene.latency,
            lengths,
            acceptances=scene.acceptances,
            replays=drafts,
            choose_drafting=gates[tp_degree],
            max_num_seqs=rollout.max_num_seqs,
            max_context_tokens=scene.kv_capacity_tokens.get(tp_degree),
            report_s=scene.report_s if policies else None,
            switch=switch_times(scene.costs, tp_degree),
        )
        for index, tp_degree in sorted(scene.tp_degrees.items())
    ]
    observed = [ObservedPolicy(policy, scene.pools, max_switches) for policy in policies]
    policy_set = PolicySet(
        policies=tuple(observed),
        drafting=scene.inputs.plan.drafting,
        choose_drafting=gates[rollout.tp_degree],
    )
    rollouts, outcome = run_virtual(roll_out(engines, policy_set, scene.placed(), scene.pools))
    assert len(rollouts) == len(lengths) == len({r.request.id for r in rollouts})
    timelines = {engine.index: engine.intervals for engine in engines}
    made = [switch for policy in observed for switch in policy.made]
    return SceneRun(
        scene=scene,
        step_s=rollouts[-1].finished_s,
        rollouts=tuple(rollouts),
        timelines=timelines,
        outcome=outcome,
        switches=tuple(_timed(made, scene.pools, timelines)),
        begun={pool.index: pool.base for pool in scene.pools}
        | {p: degree for policy in observed for p, degree in policy.begun.items()},
    )


def switch_times(costs: SwitchCosts, tp_degree: int) -> SwitchTimes:
    """Times that one engine takes for its part of a switch."""
    transfer_s = partial(costs.transfer_s, tp_degree)
    return SwitchTimes(
        wake_s=costs.wake_s + costs.weights_s,
        save_s=transfer_s,
        ahead=costs.ahead,
        load_s=transfer_s,
    )


def _timed(
    made: Sequence[Switch], pools: Sequence[Pool], timelines: Mapping[int, Sequence[Interval]]
) -> Iterator[Switch]:
    for number, switch in enumerate(made):
        move, at_s = switch.move, switch.at_s
        until_s = next((o.at_s for o in made[number + 1 :] if o.move.pool == move.pool), math.inf)
        engines = pools[move.pool].engines[move.tp_degree]
        starts_s = (_first_step_s(timelines[i], at_s, until_s) for i in engines)
        # Where it is switched again before a step, it has taken all the time until then.
        ready_s = max((start_s for start_s in starts_s if start_s is not None), default=until_s)
        yield replace(switch, seconds=ready_s - at_s)


def _first_step_s(intervals: Sequence[Interval], after_s: float, until_s: float) -> float | None:
    starts_s = (i.start_s for i in intervals if not i.prefill and after_s <= i.start_s < until_s)
    return next(starts_s, None)
