"""Settings as the config classes declare them, and errors that suggest the right name."""

import pytest

from refrain.engines.user_files import validated
from refrain.schemas.config import TrainConfig
from refrain.schemas.resume import settings_of
from refrain.schemas.settings import declared_settings, described_values, meant_by

GIVEN = {"model": {"path": "m"}, "data": {"train": ["d"]}}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("rollout.num_engine", "rollout.num_engines"),
        ("rollout.tp", "rollout.tp_degree"),
        ("learning_rate", "trainer.learning_rate"),
        ("rollout.epochs", "num_epochs"),
        ("reward.time_out_s", "reward.timeout_s"),
        ("trainer.lora.ranks", "trainer.lora.rank"),
        ("zzz", None),
    ],
)
def test_errors_suggest_the_meant_setting(name, meant):
    assert meant_by(name, TrainConfig) == meant


def test_an_unknown_setting_is_refused_with_the_one_that_is_meant():
    with pytest.raises(
        ValueError, match=r"rollout\.num_engine: .*did you mean rollout\.num_engines\?"
    ):
        validated(GIVEN | {"rollout": {"num_engine": 2}}, "my.yaml", TrainConfig)
    with pytest.raises(ValueError, match=r"zzz: Extra inputs are not permitted$"):
        validated(GIVEN | {"zzz": 2}, "my.yaml", TrainConfig)


def test_stop_strings_are_a_few_texts_or_one():
    def stop(given):
        config = validated(GIVEN | {"rollout": {"stop": given}}, "my.yaml", TrainConfig)
        return config.rollout.stop

    assert (stop("</answer>"), stop(["a", "b"])) == (("</answer>",), ("a", "b"))
    for wrong in ([""], ["x" * 101], [f"{i}" for i in range(17)]):
        with pytest.raises(ValueError, match=r"rollout\.stop"):
            stop(wrong)


def test_every_setting_is_declared_once_and_explained():
    settings = list(declared_settings(TrainConfig))
    names = [setting.name for setting in settings]
    assert len(names) == len(set(names))
    assert settings_of(TrainConfig.model_validate(GIVEN)).keys() <= set(names) | {"trainer.lora"}
    unexplained = [one.name for one in settings if not (one.is_section or one.field.description)]
    assert unexplained in ([], ["reward.type"])


def test_a_setting_of_several_classes_shows_the_values_of_all():
    (kind,) = (one for one in declared_settings(TrainConfig) if one.name == "reward.type")
    assert described_values(kind.field) == "`builtin`, `function`, `environment`"
    (timeout,) = (one for one in declared_settings(TrainConfig) if one.name == "reward.timeout_s")
    assert described_values(timeout.field) == "float > 0"
