"""Who decides on moves in a run: one controller, or each technique for itself."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from engines.control.controller import Controller
from engines.control.objective import FewestGpuSeconds, SoonestEnd
from engines.histopipe.migration import Migration
from engines.latency.analytic import AnalyticLatency
from engines.latency.hardware import H100
from engines.latency.model_shape import SHAPES
from engines.rollout.moves import EngineView, Reshape, RolloutView
from engines.specactor.best_of_n import BestOfN
from schemas.config import TrainConfig
from schemas.layout import Pool
from schemas.rollout import LengthHistory, RequestId, Split
from schemas.step import PromptGroup, RankingGroup, StepPlan
from tasks.run.policies import step_policies
from tests.conftest import DEMO

POOL = Pool(0, {1: (0, 1, 2, 3), 2: (4, 5), 4: (6,)})
LATENCY = AnalyticLatency(SHAPES["LLaMA3.1-8B"], H100)
DRAFTER = {"name": "small", "path": str(DEMO / "drafter")}


@dataclass
class StandIn:
    """The parts of a run that are asked."""

    config: TrainConfig
    latency: Any = LATENCY
    last_batch: Any = None
    lengths: dict[str, LengthHistory] = field(default_factory=dict)

    @property
    def inputs(self) -> Any:
        prompt = SimpleNamespace(token_ids=(1,) * 100)
        return SimpleNamespace(latency=self.latency, ladder=None, prompts={"a": prompt})

    @property
    def engines(self) -> Any:
        return SimpleNamespace(pools=(POOL,), keeps_weights=True)

    async def store(self, method: str, *_: Any) -> Any:
        assert method == "length_history"
        return self.lengths


def run_of(**changes: Any) -> StandIn:
    values = {
        "model": {"path": str(DEMO / "model"), "dtype": "float32"},
        "data": {"train": ["d"], "max_response_tokens": 16_384},
        "trainer": {"micro_batch_tokens": 32_768},
        "rollout": {"num_engines": 4},
        "pat": {"tp_degrees": [2, 4], "switch_s": 0.1},
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
    run = run_of(specactor={"draft_models": [DRAFTER]}, mode="pipelined")
    run.latency = None
    migration, races = await step_policies(run, RANKED)
    assert isinstance(migration, Migration)
    assert isinstance(races, BestOfN)
    run = run_of(pat={})
    run.latency = None
    assert await step_policies(run, plan()) == ()


async def test_with_one_a_controller_has_all_that_is_switched_on():
    (controller,) = await step_policies(run_of(), plan())
    assert isinstance(controller, Controller)
    assert isinstance(controller.objective, SoonestEnd)
    assert [technique.name for technique in controller.techniques] == ["reshape"]
    run = run_of(specactor={"draft_models": [DRAFTER]}, mode="pipelined")
    (controller,) = await step_policies(run, RANKED)
    assert isinstance(controller, Controller)
    assert isinstance(controller.objective, FewestGpuSeconds)
    names = [technique.name for technique in controller.techniques]
    assert names == ["reshape", "outliers", "race"]


async def test_a_tail_goes_to_a_higher_tp_degree():
    """One response of 1,000 tokens is left, of at most 16K; 100 are not worth it."""
    (controller,) = await step_policies(run_of(), plan())
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
    (controller,) = await step_policies(almost, plan())
    assert controller.decide(RolloutView(10.0, engines, num_finished=3, num_rollouts=4)) == []
