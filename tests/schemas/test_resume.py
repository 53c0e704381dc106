"""Each setting declares whether it may change when a run is resumed."""

import pytest
from pydantic import BaseModel

from refrain.schemas.config import TrainConfig
from refrain.schemas.profile import ProfileConfig
from refrain.schemas.resume import OnResume, changed_settings, settings_of

GIVEN = {"model": {"path": "m"}, "data": {"train": ["d"]}}
CONFIG = TrainConfig.model_validate(GIVEN)
OWN_REWARD = {"type": "function", "path": "score.py"}


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        TrainConfig.model_validate(GIVEN | {"reward": OWN_REWARD}),
        ProfileConfig.model_validate({"model": "m"}),
    ],
)
def test_every_setting_declares_whether_it_may_change(config: BaseModel) -> None:
    undecided = [name for name, setting in settings_of(config).items() if not setting.on_resume]
    assert not undecided, "mark these settings Kept, Free or Rounding (schemas/resume.py)"


def test_settings_that_decide_tokens_are_kept() -> None:
    kept = {name for name, said in settings_of(CONFIG).items() if said.on_resume is OnResume.KEPT}
    sections = {name.partition(".")[0] for name in kept if "." in name}
    assert sections == {"model", "data", "rollout", "histopipe", "reward", "algorithm", "trainer"}
    of_rollout = {
        "placement",
        "oversample",
        "group_size",
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "validation",
    }
    assert {name for name in kept if name.startswith("rollout.")} == {
        f"rollout.{name}" for name in of_rollout
    }
    assert {"seed", "staleness", "prompts_per_step", "validation_samples"} <= kept
    assert {"reward.type", "histopipe.min_growth", "trainer.learning_rate"} <= kept


def test_a_section_speaks_for_the_settings_that_do_not() -> None:
    other = GIVEN | {"reward": OWN_REWARD | {"timeout_s": 9.0}, "drafting": {"max_draft": 9}}
    told = {
        c.name: c.on_resume for c in changed_settings(CONFIG, TrainConfig.model_validate(other))
    }
    kept = dict.fromkeys(
        [f"reward.{name}" for name in ("function", "group", "kwargs", "path", "type")], "kept"
    )
    free = ("drafting.max_draft", "reward.environment", "reward.timeout_s", "reward.on_error")
    assert told == kept | dict.fromkeys(free, "free")


def test_changes_are_reported_with_their_meaning() -> None:
    fewer = TrainConfig.model_validate(GIVEN | {"trainer": {"num_processes": 2}, "runs_dir": "r"})
    assert [str(change) for change in changed_settings(CONFIG, fewer)] == [
        "runs_dir: 'runs' -> 'r'",
        "trainer.num_processes: 1 -> 2, weights differ by rounding from here on",
    ]
    assert changed_settings(fewer, fewer) == []
