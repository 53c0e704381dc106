"""All techniques use one profile. A technique that is off does not use it."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refrain.engines.accounting.step_requests import Stay, StepRequest
from refrain.engines.control.controller import Controller
from refrain.engines.control.reshaping import MissedSavings
from refrain.engines.gpus.placement import GpuPlacement
from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.rollout.moves import EngineView, RolloutView
from refrain.engines.specactor.health import DrafterHealth
from refrain.engines.specactor.ladder import token_acceptance
from refrain.engines.specactor.reconfigure import Reconfiguration
from refrain.flows.config_file import load_config
from refrain.schemas.config import TrainConfig
from refrain.schemas.counts import DraftingCounts, SwitchCounts
from refrain.schemas.latency import PointKind, Profile
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import LengthHistory, RequestId, Split
from refrain.schemas.step import PromptGroup, StepPlan
from refrain.schemas.timeline import Timeline
from refrain.tasks.run.engines import make_generation
from refrain.tasks.run.policies import predict_end, step_policies
from refrain.tasks.run.preflight import Inputs, read_inputs
from refrain.tasks.run.timeline import _savings
from refrain.tasks.schedule import _rollout_time
from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import write_config

ALL_ON = ("staleness=1", "pat.tp_degrees=[2]")
SMALL = f"specactor.draft_models=[{{name: small, path: {DEMO / 'drafter'}}}]"
DRAFTED = StepRequest(
    RequestId(Split.TRAIN, 1, "a", 0), (Stay(0, 0.0, 1.0),), "stop", 20, 20, 5, 10, 10
)


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Return the demo's profile with made-up points: engines of TP 2 and a draft model."""
    baseline = REPOSITORY / "benchmarks" / "baselines" / "profile_demo.json"
    measured = Profile.model_validate_json(baseline.read_bytes())
    more = [
        point.model_copy(
            update={"drafter": "small"} if point.kind is PointKind.DRAFT else {"tp_degree": 2}
        )
        for point in measured.points
    ]
    whole = measured.model_copy(update={"points": (*measured.points, *more)})
    (tmp_path / "profile.json").write_text(whole.model_dump_json())
    return tmp_path / "profile.json"


ENGINES: Any = SimpleNamespace(
    pools=(Pool(0, {1: (0, 1), 2: (2,)}),), keeps_weights=True, missed_savings=MissedSavings()
)


@dataclass
class StandIn:
    """The parts of a run that the code under test reads."""

    config: TrainConfig
    inputs: Inputs

    async def drafter_health(self, _: int) -> DrafterHealth:
        return DrafterHealth()

    last: Any = None
    """Rollouts of the last step."""
    lengths: dict[str, LengthHistory] = field(default_factory=dict)

    async def store(self, method: str, *_: Any) -> Any:
        return {"length_history": self.lengths, "stage": self.last}[method]


def run_of(directory: Path, *overrides: str) -> StandIn:
    config = load_config(write_config(directory), overrides)
    return StandIn(config, read_inputs(config))


def plan() -> StepPlan:
    return StepPlan(
        split=Split.TRAIN, step=1, epoch=0, policy_version=0, created_s=0.0, group_size=4, groups=()
    )


def savings_source(run: Any) -> str:
    batch = SimpleNamespace(split=Split.TRAIN, step=1, shares=())
    recorded = SimpleNamespace(timeline=Timeline(0.0, 1.0, (0,), (), tp_degrees={0: 1}))
    savings = _savings(run, batch, recorded, [DRAFTED])
    assert savings is not None
    return savings.source


async def gate_profiles(run: StandIn) -> set[str | None]:
    made = await make_generation(run.config, run.inputs.latency, 0, GpuPlacement(), print)
    return {engine._setup.profile_json for engine in made.drafters._engines}


async def test_all_techniques_use_one_profile(tmp_path: Path, profile: Path) -> None:
    run: Any = run_of(tmp_path, *ALL_ON, SMALL, f"profile={profile}")
    latency = run.inputs.latency
    assert isinstance(latency, FittedLatency)
    assert run.inputs.ladder.latency is latency
    assert run.inputs.ladder.drafters == ("histospec", "ngram", "small")
    assert await gate_profiles(run) == {latency.profile.model_dump_json()}
    assert _rollout_time(run, None).args[0] is latency
    controller, redrafts, *_ = await step_policies(run, ENGINES, plan())
    assert isinstance(controller, Controller)
    assert controller.reshaping.costs.latency is latency
    assert isinstance(redrafts, Reconfiguration)
    assert savings_source(run) == f"profile={profile}"


async def test_forecasts_know_what_each_prompt_gains_by_drafts(
    tmp_path: Path, profile: Path
) -> None:
    run: Any = run_of(tmp_path, *ALL_ON, f"profile={profile}")
    run.last = SimpleNamespace(speculation=(3.0, 4), sync_s=0.0, switches=SwitchCounts())
    groups = tuple(
        PromptGroup(prompt_key=key, engine=0, expected_tokens=100.0, expected_passes=passes)
        for key, passes in (("fast", 25.0), ("slow", 100.0), ("capped", 1.0))
    )
    unseen = PromptGroup(prompt_key="unseen", engine=0, expected_tokens=None)
    planned = plan().model_copy(update={"groups": (*groups, unseen)})
    (controller,) = await step_policies(run, ENGINES, planned)
    known = controller.outlook.prompt_acceptance
    assert known.keys() == {"fast", "slow", "capped"}
    assert known["fast"] == pytest.approx(token_acceptance(4, 0.75))
    assert (known["slow"], known["capped"]) == (0.0, 1.0)


async def test_disabled_techniques_do_not_use_the_profile(tmp_path: Path, profile: Path) -> None:
    run: Any = run_of(tmp_path, *ALL_ON[:1], f"profile={profile}")
    assert run.inputs.ladder is None
    assert not any(isinstance(one, Controller) for one in await step_policies(run, ENGINES, plan()))


def measuring(*costs: tuple[float, ...]) -> Any:
    """Return a batch whose engines measured these step costs."""
    shares = [SimpleNamespace(drafting=DraftingCounts(step_costs=each)) for each in costs]
    return SimpleNamespace(shares=shares, speculation=(2.0, 3))


async def test_without_one_engines_are_allocated_by_what_they_measured(tmp_path: Path) -> None:
    run: Any = run_of(tmp_path, *ALL_ON[:1])
    costs = (0.01, 0.001, 0.001, 1e-7, 0.0, 0.0)
    rollout_time = _rollout_time(run, measuring((), costs, costs, (9.0, *costs[1:])))
    assert rollout_time is not None
    # Two prompts, 50 passes: each on its own engine, then both on one.
    lengths, two = np.full((2, 4), 100), np.full((2, 4), 2.0)
    seconds = rollout_time(lengths, 2, tokens_per_pass=two)
    assert seconds == pytest.approx(50 * (0.01 + 4 * 0.001), rel=0.02)
    seconds = rollout_time(lengths, 1, tokens_per_pass=two)
    assert seconds == pytest.approx(50 * (0.01 + 8 * 0.001), rel=0.02)
    assert _rollout_time(run, measuring((), ())) is None


def with_history(run: Any) -> RolloutView:
    """Give the run's first prompt a history. Return a view of a step of two requests for it."""
    key = next(iter(run.inputs.prompts))
    run.lengths = {key: LengthHistory(100.0, 200, 100.0)}
    progress = {RequestId(Split.TRAIN, 1, key, i): 10 for i in range(2)}
    return RolloutView(0.0, (EngineView(0, progress),), 0, 2)


async def test_a_running_stage_shows_the_controller_s_forecast(
    tmp_path: Path, profile: Path
) -> None:
    run: Any = run_of(tmp_path, *ALL_ON, f"profile={profile}")
    run.last = SimpleNamespace(speculation=(3.0, 4), sync_s=0.0, switches=SwitchCounts())
    view = with_history(run)
    (controller,) = await step_policies(run, ENGINES, plan())
    end = await predict_end(run, plan())
    assert isinstance(controller, Controller)
    assert end is not None
    assert end.left_s(view) == controller.outlook.forecast(view).end_s > 0.0
    assert end.outlook is not controller.outlook, "to watch may not change a decision"
    assert end.outlook.remaining is not controller.outlook.remaining
    validation = plan().model_copy(update={"split": Split.VALIDATION})
    assert await predict_end(run, validation) is None


async def test_without_one_a_running_stage_shows_what_engines_measured(tmp_path: Path) -> None:
    run: Any = run_of(tmp_path, *ALL_ON[:1])
    costs = (0.01, 0.001, 0.001, 0.0, 0.0, 0.0)
    counts = DraftingCounts(num_steps=100, draft_s=1.0, step_costs=costs)
    shares = (SimpleNamespace(drafting=counts), SimpleNamespace(drafting=DraftingCounts()))
    run.last = SimpleNamespace(shares=shares, speculation=(2.0, 3))
    view = with_history(run)
    end = await predict_end(run, plan())
    assert end is not None
    state = end.outlook.forecast(view)
    # A step takes 0.01 s for itself, 0.001 s for a request, and 0.01 s for its drafts.
    few, most = (max(state.ends_s.values()) / (0.02 + num * 0.001) for num in (2, 1))
    remaining = end.outlook.remaining.tokens(dict.fromkeys(view.engines[0].progress, 10))
    assert few < max(remaining.values()) / 2.0 < most
    run.last = measuring(())
    assert await predict_end(run, plan()) is None
    run.last = None
    assert await predict_end(run, plan()) is None


async def test_an_end_is_unknown_where_the_time_of_a_drafter_is(tmp_path: Path) -> None:
    run: Any = run_of(tmp_path, SMALL.replace("small", "unknown"))
    run.last = measuring((0.01, 0.001, 0.001, 0.0, 0.0, 0.0))
    assert await predict_end(run, plan()) is None


async def test_without_profile_no_technique_has_times(tmp_path: Path) -> None:
    run: Any = run_of(tmp_path, *ALL_ON[:1], SMALL)
    assert (run.inputs.latency, run.inputs.ladder, _rollout_time(run, None)) == (None, None, None)
    assert await gate_profiles(run) == {None}
