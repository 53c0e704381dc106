"""A run plans before its start how engines and drafters share the GPUs, and keeps that split."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from refrain.engines.inference.drafting.drafters import Drafter, Drafters
from refrain.flows.config_file import load_config, override
from refrain.flows.launch import launch_train
from refrain.flows.prepare import training_plan
from refrain.schemas.config import TrainConfig
from refrain.schemas.latency import PointKind, Profile
from refrain.tasks.run.gpus import wanted_gpus
from refrain.tasks.run.run_dir import claim_run_dir, read_config
from refrain.tasks.run.split import with_gpu_split
from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import write_config
from tests.inference.real import CONFIG

SMALL = f"specactor.draft_models=[{{name: small, path: {DEMO / 'drafter'}}}]"
SPLIT = "specactor.split_gpus=6"


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Return the demo's profile with a drafter whose token takes half an engine step."""
    baseline = REPOSITORY / "benchmarks" / "baselines" / "profile_demo.json"
    measured = Profile.model_validate_json(baseline.read_bytes())
    step_s = next(p.seconds for p in measured.points if p.kind is PointKind.DECODE)
    drafts = [
        point.model_copy(update={"drafter": "small", "seconds": step_s / 2 * point.window})
        for point in measured.of_kind(PointKind.DRAFT)
    ]
    whole = measured.model_copy(update={"points": (*measured.points, *drafts)})
    (tmp_path / "profile.json").write_text(whole.model_dump_json())
    return f"profile={tmp_path / 'profile.json'}"


def planned(directory: Path, *overrides: str) -> TrainConfig:
    config = load_config(write_config(directory), [SMALL, *overrides])
    return with_gpu_split(config)[0]


def test_gpus_are_shared_out_as_planned(tmp_path: Path, profile: str) -> None:
    given = load_config(write_config(tmp_path), [SMALL, SPLIT, profile])
    config, sentence = with_gpu_split(given)
    specactor, num_engines = config.specactor, config.rollout.num_engines
    num_drafters = specactor.draft_models[0].num_engines
    assert (num_engines + num_drafters, specactor.split_gpus) == (6, None)
    assert 1 <= num_drafters <= num_engines
    assert specactor.window != given.specactor.window
    assert len(config.engine.drafter_processes) == num_drafters
    wanted = [one.what for one in wanted_gpus(config)]
    assert wanted[:6] == [
        *(f"engine {i}" for i in range(num_engines)),
        *(f"drafter process {i}" for i in range(num_drafters)),
    ]
    assert f"rollout.num_engines={num_engines} of TP 1" in sentence
    assert f"{num_drafters} of drafter small, specactor.window={specactor.window}" in sentence
    assert with_gpu_split(config) == (config, "")


def test_drafts_that_are_expected_to_be_wrong_have_short_windows(
    tmp_path: Path, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned_at(acceptance: float) -> TrainConfig:
        monkeypatch.setattr("refrain.tasks.run.split.EXPECTED_ACCEPTANCE", acceptance)
        return planned(tmp_path, SPLIT, profile)

    seldom, often = planned_at(0.2), planned_at(0.95)
    assert seldom.specactor.window < often.specactor.window


def test_other_draft_models_keep_their_gpus(tmp_path: Path, profile: str) -> None:
    other = f"{{name: other, path: {DEMO / 'drafter'}, num_engines: 3}}"
    models = f"{SMALL[:-1]}, {other}]"
    with pytest.raises(ValueError, match="no draft points of other"):
        planned(tmp_path, models, SPLIT, profile)
    path = Path(profile.removeprefix("profile="))
    timed = Profile.model_validate_json(path.read_bytes())
    more = [
        point.model_copy(update={"drafter": "other"})
        for point in timed.of_kind(PointKind.DRAFT)
        if point.drafter == "small"
    ]
    path.write_text(timed.model_copy(update={"points": (*timed.points, *more)}).model_dump_json())
    by_name = planned(tmp_path, models, SPLIT, profile, "specactor.drafter=other")
    small, third = by_name.specactor.draft_models
    assert (small.num_engines, third.num_engines + by_name.rollout.num_engines) == (1, 6)
    first = planned(tmp_path, models, SPLIT, profile)
    small, third = first.specactor.draft_models
    assert (small.num_engines + first.rollout.num_engines, third.num_engines) == (6, 3)


@pytest.mark.parametrize(("num_engines", "num_drafters"), [(1, 1), (5, 2), (4, 4), (7, 3)])
async def test_drafters_of_a_model_share_the_engines_evenly(
    monkeypatch: pytest.MonkeyPatch, num_engines: int, num_drafters: int
) -> None:
    """Each engine has one drafter, and no drafter has more engines than it must."""
    reached: dict[int, list[str]] = {index: [] for index in range(num_engines)}

    class Engine:
        def __init__(self, index: int) -> None:
            self.index = index

        async def connect_drafters(self, addresses: dict[str, str]) -> None:
            reached[self.index].append(addresses["small"])

    async def start(self: Drafter) -> str:
        return str(id(self))

    monkeypatch.setattr(Drafter, "start", start)
    (one,) = CONFIG.engine.drafter_processes
    engines: Any = [Engine(index) for index in range(num_engines)]
    drafters = Drafters([one] * num_drafters, engines, print)
    await drafters.start()
    await drafters.shutdown()
    assert all(len(addresses) == 1 for addresses in reached.values())
    load = Counter(addresses[0] for addresses in reached.values())
    assert len(load) == num_drafters
    assert max(load.values()) == -(-num_engines // num_drafters)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["specactor.draft_models=[]"], "there is no draft model to give GPUs to"),
        (["pat.tp_degrees=[2]"], "engines take whole nodes"),
        (["rollout.tp_degree=6"], r"split_gpus \(6\) leaves no GPU for a drafter beside"),
        (["profile=null"], r"profile is not.*refrain profile --draft-model small=PATH"),
        (["rollout.tp_degree=2"], "no decode points at TP 2"),
        (["model.path=nowhere"], "nowhere"),
    ],
)
def test_impossible_splits_are_refused(
    tmp_path: Path, profile: str, overrides: list[str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        planned(tmp_path, SPLIT, profile, *overrides)


def test_a_split_of_one_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split_gpus"):
        planned(tmp_path, "specactor.split_gpus=1")


def test_a_drafter_that_was_not_measured_is_refused(tmp_path: Path, profile: str) -> None:
    path = Path(profile.removeprefix("profile="))
    measured = Profile.model_validate_json(path.read_bytes())
    points = tuple(point for point in measured.points if point.drafter != "small")
    path.write_text(measured.model_copy(update={"points": points}).model_dump_json())
    with pytest.raises(ValueError, match="no draft points of small: make it again with refrain"):
        planned(tmp_path, SPLIT, profile)


def test_resumed_run_keeps_its_split_unless_changed(
    tmp_path: Path, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = load_config(write_config(tmp_path), [SMALL, SPLIT, profile])
    plan = training_plan(given, resume=False)
    assert "split of 6 GPUs" in plan.gpu_split
    config = plan.config
    claim_run_dir(config, resume=False).release()
    recorded = read_config(config.run_dir)
    assert recorded.rollout.num_engines == config.rollout.num_engines
    assert recorded.specactor == config.specactor
    # Resume by the run's name, then by its config file.
    for resumed in (recorded, given):
        plan = training_plan(resumed, resume=True)
        assert (plan.changes, plan.config.specactor) == ((), config.specactor)
    capsys.readouterr()
    launch_train(None, ["specactor.split_gpus=3"], str(config.run_dir), overwrite=False, check=True)
    told = capsys.readouterr().out
    assert "split of 3 GPUs" in told
    assert f"resumed with rollout.num_engines: {config.rollout.num_engines} -> 2\n" in told
    by_hand = override(recorded, ["rollout.num_engines=1"])
    (change,) = training_plan(by_hand, resume=True).changes
    assert change.name == "rollout.num_engines"
