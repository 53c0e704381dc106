"""A run and a simulation build the same policies: one controller, or one policy per technique."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields
from enum import Enum
from types import MethodType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pydantic import BaseModel

from refrain.benchmarks.papers.pat import BEST, STEPS, lengths, machine
from refrain.benchmarks.papers.scene import Scene, switch_times
from refrain.benchmarks.papers.switching import Steps
from refrain.engines.control.controller import Controller
from refrain.engines.control.reshaping import MissedSavings
from refrain.engines.control.techniques import OnceStarted, StepInputs, plan_policies
from refrain.engines.histopipe.migration import Migration
from refrain.engines.histopipe.sample_queue import SampleQueue
from refrain.engines.latency.analytic import AnalyticLatency
from refrain.engines.latency.hardware import H100
from refrain.engines.latency.measured import MeasuredLatency
from refrain.engines.latency.model_shape import SHAPES
from refrain.engines.pat.costs import SwitchCosts
from refrain.engines.rollout.moves import EngineView, Reshape, RolloutView, moves_long
from refrain.engines.simulate.trace import Trace
from refrain.engines.specactor.best_of_n import BestOfN
from refrain.engines.specactor.ladder import Ladder
from refrain.engines.specactor.reconfigure import Reconfiguration
from refrain.schemas.config import TrainConfig
from refrain.schemas.counts import DraftingCounts, SwitchCounts
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import LengthHistory, RequestId, RolloutRequest, Split
from refrain.schemas.step import PromptGroup, RankingGroup, StepPlan
from refrain.tasks.history import known_before
from refrain.tasks.rollout import _min_rollouts
from refrain.tasks.run.model_inputs import model_shape
from refrain.tasks.run.policies import (
    FIRST_KV_BYTES_PER_S,
    FIRST_SWITCH_S,
    _costs,
    kv_rule,
    step_policies,
)
from refrain.tasks.run.preflight import Inputs
from tests.conftest import DEMO
from tests.specactor.latencies import AffineLatency

POOL = Pool(0, {1: (0, 1, 2, 3), 2: (4, 5), 4: (6,)})
ENGINES: Any = SimpleNamespace(pools=(POOL,), keeps_weights=True, missed_savings=MissedSavings())
LATENCY = AnalyticLatency(SHAPES["LLaMA3.1-8B"], H100)
DRAFTER = {"name": "small", "path": str(DEMO / "drafter")}


@dataclass
class StandIn:
    """The parts of a run that the code under test reads."""

    config: TrainConfig
    latency: Any = LATENCY
    lengths: dict[str, LengthHistory] = field(default_factory=dict)
    ladder: Ladder | None = None
    acceptances: dict[str, float] = field(default_factory=dict)
    stage: Any = None
    trainer: Any = None

    @property
    def inputs(self) -> Any:
        prompt, nothing = SimpleNamespace(token_ids=(1,) * 100), SimpleNamespace()
        given: Any = ({}, {"a": prompt}, nothing, nothing)
        return Inputs(*given, latency=self.latency, ladder=self.ladder)

    async def drafter_health(self, _: int) -> Any:
        return SimpleNamespace(acceptances=lambda *_: self.acceptances)

    async def store(self, method: str, *_: Any) -> Any:
        return {"length_history": self.lengths, "stage": self.stage}[method]


def run_of(**changes: Any) -> StandIn:
    values = {
        "model": {"path": str(DEMO / "model"), "dtype": "float32"},
        "data": {"train": ["d"], "max_response_tokens": 16_384},
        "trainer": {"micro_batch_tokens": 32_768},
        "rollout": {"num_engines": 4},
        "pat": {"tp_degrees": [2, 4]},
        "profile": "p",
    }
    return StandIn(TrainConfig.model_validate(values | changes))


def plan(*ranking_groups: RankingGroup) -> StepPlan:
    return StepPlan(
        split=Split.TRAIN,
        step=4,
        epoch=1,
        policy_version=3,
        created_s=0.0,
        group_size=4,
        groups=(PromptGroup(prompt_key="a", engine=0, expected_tokens=None),),
        ranking_groups=ranking_groups,
    )


RANKED = plan(
    RankingGroup(engines=(0, 1, 2, 3), num_prompts=1, representative_tokens=10.0, longest_tokens=20)
)


async def test_without_a_latency_model_each_decides_for_itself():
    run = run_of(specactor={"draft_models": [DRAFTER]}, staleness=1)
    run.latency = None
    migration, races = await step_policies(run, ENGINES, RANKED)
    assert isinstance(migration, Migration)
    assert isinstance(races, BestOfN)
    run = run_of(pat={})
    run.latency = None
    assert await step_policies(run, ENGINES, plan()) == ()


async def test_with_one_a_controller_decides_on_switches_first():
    (controller,) = await step_policies(run_of(), ENGINES, plan())
    assert isinstance(controller, Controller)
    assert controller.reshaping.idles
    run = run_of(specactor={"draft_models": [DRAFTER]}, staleness=1)
    policies = await step_policies(run, ENGINES, RANKED)
    assert [type(policy) for policy in policies] == [Controller, Migration, BestOfN]
    assert not policies[0].reshaping.idles


async def test_a_tail_goes_to_a_higher_tp_degree():
    """One response is left, at 1,000 of at most 16K tokens: reshape. Negative control: with at most
    1,010 tokens a switch does not pay."""
    (controller,) = await step_policies(run_of(), ENGINES, plan())
    engines = tuple(
        EngineView(i, {RequestId(Split.TRAIN, 4, "a", 0): 1000} if i == 0 else {}) for i in range(4)
    )
    (move,) = controller.decide(RolloutView(10.0, engines, num_finished=3, num_rollouts=4))
    assert isinstance(move, Reshape)
    assert (move.pool, move.tp_degree) == (0, 4)
    almost = run_of()
    almost.config = almost.config.model_copy(
        update={"data": almost.config.data.model_copy(update={"max_response_tokens": 1010})}
    )
    (controller,) = await step_policies(almost, ENGINES, plan())
    assert controller.decide(RolloutView(10.0, engines, num_finished=3, num_rollouts=4)) == []


async def test_switch_costs_are_those_measured_in_the_run():
    """Before the first switch, and for validation, the costs are guesses."""
    seen = SwitchCounts((0.2, 0.4, 0.3), (3e9, 5e9, 4e9))
    last: Any = SimpleNamespace(sync_s=0.0, switches=seen, speculation=(1.0, 0))
    run = run_of()
    told = _costs(run, LATENCY, ENGINES, None)
    assert (told.wake_s, told.link_bytes_per_s) == (FIRST_SWITCH_S, FIRST_KV_BYTES_PER_S)
    measured = _costs(run, LATENCY, ENGINES, last)
    assert (measured.wake_s, measured.link_bytes_per_s) == (0.3, 4e9)
    run.stage = last
    (controller,) = await step_policies(run, ENGINES, plan())
    assert controller.reshaping.costs == measured
    validation = plan().model_copy(update={"split": Split.VALIDATION})
    (controller,) = await step_policies(run, ENGINES, validation)
    assert controller.reshaping.costs == told


async def test_requests_take_keys_and_values_along_by_what_the_run_has_measured():
    """Without races and switches they cannot. Before a prefill is known, 2,048 tokens decide. Then
    it is the profile, or the steps that the run has measured."""
    nothing, racing = run_of(pat={}), run_of(pat={}, **DRAFTING)
    assert not (await kv_rule(nothing, ENGINES, plan()))(1, 1, 10**6)
    (rule, costs) = await kv_rule(racing, ENGINES, plan()), _costs(racing, LATENCY, ENGINES, None)
    assert rule.__self__ == costs
    racing.latency = None
    assert await kv_rule(racing, ENGINES, plan()) is moves_long
    assert [moves_long(1, 1, num) for num in (2047, 2048)] == [False, True]
    # A prompt token takes 10 us. The demo's model has 512 bytes a token: 0.5 us to save and load.
    racing.stage = SimpleNamespace(
        **vars(last_step(*STEP_COSTS)), sync_s=0.0, switches=SwitchCounts()
    )
    per_token_s = model_shape(racing.config).kv_bytes_per_token / FIRST_KV_BYTES_PER_S
    assert 2 * per_token_s < STEP_COSTS[-1]
    assert (await kv_rule(racing, ENGINES, plan()))(1, 1, 10)
    racing.stage.switches = SwitchCounts((), (1e3,))
    assert not (await kv_rule(racing, ENGINES, plan()))(1, 1, 10_000)


LADDER = Ladder(AffineLatency(10e-3, 1e-4, 5e-5), 1, ("ngram", "small"), 300.0, 8, {"small": 2})
PIPELINED = {"staleness": 1}
DRAFTING = {"specactor": {"draft_models": [DRAFTER]}}
CONFIGS = {
    "switching": ({}, plan(), None),
    "everything": (PIPELINED | DRAFTING, RANKED, LADDER),
    "each for itself": (PIPELINED | DRAFTING | {"pat": {}}, RANKED, LADDER),
    "races without a ladder": (DRAFTING | {"pat": {}}, plan(), None),
    "nothing": ({"pat": {}}, plan(), None),
}


def simulated(run: StandIn, plan: StepPlan) -> Scene:
    """Return a scene with the same config and facts as this run."""
    row = {"step": 4, "epoch": 1, "prompt_key": "a", "sample_index": 0}
    rows = Trace(pa.Table.from_pylist([row | {"prompt_tokens": 100, "response_tokens": 9}]), "test")
    return Scene(
        config=run.config,
        rows=rows,
        latency=LATENCY,
        tp_degrees={i: tp for tp, engines in POOL.engines.items() for i in engines},
        pools=(POOL,),
        costs=_costs(run, LATENCY, ENGINES, None),
        lengths=run.lengths,
        inputs=StepInputs(
            plan=plan, ladder=run.ladder, acceptances=run.acceptances, prompt_tokens=100.0
        ),
    )


def described(what: Any) -> Any:
    """Return types and settings of an object and of all that it holds."""
    if isinstance(what, Mapping):
        return {described(key): described(value) for key, value in what.items()}
    if isinstance(what, Set):
        return frozenset(map(described, what))
    if isinstance(what, (list, tuple)):
        return [described(one) for one in what]
    if what is None or isinstance(what, (Enum, BaseModel, str, int, float)):
        return what
    if isinstance(what, MethodType):
        return what.__name__, described(what.__self__)
    slots = [name for kind in type(what).__mro__ for name in getattr(kind, "__slots__", ())]
    settings = getattr(what, "__dict__", {}) | {name: getattr(what, name) for name in slots}
    return type(what).__name__, {name: described(value) for name, value in settings.items()}


@pytest.mark.parametrize("name", CONFIGS)
async def test_run_and_simulator_build_the_same_techniques(name):
    changes, step_plan, ladder = CONFIGS[name]
    run = run_of(**changes)
    run.ladder, run.lengths = ladder, {"a": LengthHistory(50.0, 900, 40.0)}
    run.acceptances = {"small": 0.8, "ngram": 0.3} if ladder else {}
    real = await step_policies(run, ENGINES, step_plan)
    assert described(real) == described(simulated(run, step_plan).policies())
    kinds = {
        "everything": [Controller, Migration, Reconfiguration, BestOfN],
        "each for itself": [Migration, Reconfiguration, BestOfN],
        "races without a ladder": [BestOfN],
        "nothing": [],
    }
    assert [type(policy) for policy in real] == kinds.get(name, [Controller])


def test_paper_scenes_switch_as_runs_do():
    """Only costs of the machine and the model may differ. Transfers and waits work the same way."""
    scene = Steps.draw(machine(BEST), lengths(BEST), 0).scene(STEPS[0], 2)
    of_run, of_scene = _costs(run_of(), LATENCY, ENGINES, None), scene.costs
    depends = {"latency", "kv_bytes_per_token", "num_kv_heads", "link_bytes_per_s", "wake_s"}
    same = {one.name for one in fields(SwitchCosts)} - depends
    assert same >= {"kv", "staged", "ahead", "weights_s"}
    for name in same:
        assert getattr(of_run, name) == getattr(of_scene, name), name
    happens, batch = switch_times(of_scene, 2), [300.0, 700.0]
    assert happens.ahead == of_run.ahead
    # The forecast equals the time that an engine of the scene takes to save and to load.
    assert of_scene.ahead_s(2, [batch, [1.0]]) == happens.save_s(1000) > 0.0
    assert of_scene.move_s(2, 2, [batch], [batch]) == happens.load_s(1000)
    assert of_scene.move_s(2, 2, [batch], [batch], 10.0) > happens.load_s(1000)


@pytest.mark.parametrize(
    ("changes", "opens"),
    [
        ({}, True),
        ({"staleness": 1}, False),
        ({"rollout": {"num_engines": 4, "weight_sync": "ipc"}}, False),
    ],
)
async def test_a_step_begins_in_the_best_layout_where_it_can(changes, opens):
    (controller,) = await step_policies(run_of(**changes), ENGINES, plan())
    assert isinstance(controller, Controller)
    assert controller.opens == opens


async def test_races_have_the_window_that_the_ladder_says():
    run = run_of(**DRAFTING, pat={})
    (races,) = await step_policies(run, ENGINES, plan())
    windows = {name: setting.window for name, setting in races._settings.items()}
    assert windows == {"histospec": run.config.drafting.max_draft, "small": 4, "ngram": 4}
    run.ladder, run.acceptances = LADDER, {"small": 0.95}
    _, races = await step_policies(run, ENGINES, plan())
    assert races._settings["small"].window > 4
    assert not races._settings["small"].coupled
    assert races._settings["ngram"].window > 4, "unknown acceptance: take that of the others"


QUEUE = {"rollout": {"num_engines": 4, "placement": "queue", "kv_cache_bytes": 10**9}, "pat": {}}
STEP_COSTS = (0.01, 1e-3, 1e-4, 1e-7, 1e-4, 1e-5)


def last_step(*step_costs: float) -> Any:
    """Return the rollouts of the last known step, of an engine that measured these costs."""
    share = SimpleNamespace(drafting=DraftingCounts(step_costs=step_costs))
    return SimpleNamespace(speculation=(3.0, 4), mean_response_tokens=700.0, shares=(share,))


def queueing(stage: Any, **changes: Any) -> tuple[Any, Any]:
    """Return a run and its engines."""
    run = run_of(**QUEUE | changes)
    run.latency, run.stage, run.trainer = None, stage, SimpleNamespace(train_s=5.0)
    return run, SimpleNamespace(living=(0, 1, 2, 3), queue=None)


async def test_a_queue_needs_the_times_of_steps():
    """Without them, and in validations, prompts keep the engines of the plan."""
    assert await step_policies(*queueing(None), plan()) == ()
    assert await step_policies(*queueing(last_step()), plan()) == ()
    run, engines = queueing(last_step(*STEP_COSTS))
    validation = plan().model_copy(update={"split": Split.VALIDATION})
    assert await step_policies(run, engines, validation) == ()
    (queue,) = await step_policies(run, engines, plan())
    assert isinstance(queue, SampleQueue)
    assert engines.queue is queue
    dealt = queueing(last_step(*STEP_COSTS), rollout={"num_engines": 4})
    assert await step_policies(*dealt, plan()) == ()


async def test_a_queue_expects_what_the_last_step_showed():
    """A prompt without a history is as long as the last step's responses, a token takes its share
    of a pass with drafts, and the KV cache holds what its bytes say."""
    run, engines = queueing(last_step(*STEP_COSTS))
    (queue,) = await step_policies(run, engines, plan())
    assert isinstance(queue, SampleQueue)
    assert queue._known.lengths.tokens("a") == pytest.approx(700.0)
    measured = MeasuredLatency(STEP_COSTS)
    decode_s = queue._limits.latency.decode_s(1, 8, 800.0)
    assert decode_s == pytest.approx(measured.verify_s(1, 8, 800.0, 4) / 3.0)
    shape = model_shape(run.config)
    assert queue._limits.max_context_tokens == 10**9 / shape.kv_bytes_per_token
    run.stage.speculation = (1.0, 0)
    (later,) = await step_policies(run, engines, plan())
    assert later._earlier == []
    assert later._limits.latency.decode_s(1, 8, 800.0) == measured.decode_s(1, 8, 800.0)


def test_other_policies_wait_until_all_samples_are_started():
    decided: list[RolloutView] = []
    once = OnceStarted(SimpleNamespace(decide=lambda view: decided.append(view) or ["a move"]))
    id = RequestId(Split.TRAIN, 4, "a", 0)
    waiting = RolloutView(0.0, (), 0, 1, waiting={id: RolloutRequest(id, (1,), 0, 10)})
    assert once.decide(waiting) == ()
    assert not decided
    assert once.decide(RolloutView(0.0, (), 0, 1)) == ["a move"]
    config = run_of(specactor={"draft_models": [DRAFTER]}, pat={}).config
    queue: Any = SimpleNamespace()
    first, *others = plan_policies(config, StepInputs(plan=plan(), queue=queue))
    assert first is queue
    assert [type(policy.policy) for policy in others] == [BestOfN]


@pytest.mark.parametrize(("staleness", "known"), [(0, 4), (1, 2), (2, 1), (4, 1)])
def test_a_step_is_planned_with_what_is_trained_by_then(staleness, known):
    run: Any = run_of(staleness=staleness, pat={}, algorithm={"tis_cap": 2.0})
    assert known_before(run, 4) == known


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness": 0},
        {"rollout": {"weight_update": "in_flight", "placement": "even"}},
        {"pat": {"tp_degrees": [2]}},
    ],
)
def test_weights_in_flight_need_a_queue_and_staleness(changes):
    flying = {"rollout": {"weight_update": "in_flight", "placement": "queue"}, "staleness": 1}
    assert run_of(**flying, pat={}).config.rollout.weight_update == "in_flight"
    with pytest.raises(ValueError, match="weight_update is in_flight: set staleness to 1 or more"):
        run_of(**flying | {"pat": {}} | changes)


@pytest.mark.parametrize(
    ("changes", "drawn", "least"),
    [
        ({"rollout": {"placement": "queue"}}, 68, 64 * 8),
        ({"rollout": {"placement": "queue", "oversample": 0.5}}, 96, 64 * 8),
        ({"rollout": {"placement": "queue", "oversample": 0.0}}, 64, 64 * 8),
        ({"rollout": {"placement": "even"}}, 64, None),
        ({}, 68, 64 * 8),
        ({"histopipe": {"last_share": 0.0}, "rollout": {"placement": "histopipe"}}, 64, None),
        ({"rollout": {"placement": "queue"}, "staleness": 0}, 64, None),
        ({"rollout": {"placement": "queue"}, "algorithm": {"type": "dapo"}}, 64, None),
    ],
)
def test_a_step_draws_as_many_samples_more_as_it_may_defer(changes, drawn, least):
    run: Any = run_of(**{"staleness": 1, "pat": {}, "prompts_per_step": 64} | changes)
    assert run.config.drawn_prompts_per_step == drawn
    groups = tuple(
        PromptGroup(prompt_key=str(i), engine=0, expected_tokens=None) for i in range(drawn)
    )
    planned = plan().model_copy(update={"groups": groups, "group_size": 8})
    assert _min_rollouts(run, planned, 0, 0) == least
    if least:
        assert _min_rollouts(run, planned, 10, 30) == least - 20
    validation = planned.model_copy(update={"split": Split.VALIDATION})
    assert _min_rollouts(run, validation, 0, 0) is None
