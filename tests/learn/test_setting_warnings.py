"""A run warns of settings that have no effect, and of no others."""

import pytest

from refrain.engines.learn.setting_warnings import setting_warnings
from refrain.schemas.algorithm import SETTINGS
from refrain.schemas.config import TrainConfig


def warnings_of(**given: object) -> list[str]:
    required = {"model": {"path": "m"}, "data": {"train": ["d"]}}
    return setting_warnings(TrainConfig.model_validate(required | given))


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_picked_by_a_type_have_an_effect(name: str) -> None:
    assert warnings_of(algorithm={"type": name}) == []


@pytest.mark.parametrize(
    ("given", "inert"),
    [
        ({"staleness": 1}, False),
        ({"algorithm": {"tis_cap": 2.0}}, True),
        ({"algorithm": {"type": "gspo"}, "trainer": {"minibatches_per_step": 1}}, True),
        ({"algorithm": {"tis_cap": 2.0}, "trainer": {"passes_per_step": 2}}, False),
        ({"algorithm": {"tis_cap": 2.0}, "trainer": {"minibatches_per_step": 2}}, False),
    ],
)
def test_a_clip_without_a_ratio_never_acts(given: dict, inert: bool) -> None:
    found = warnings_of(**given)
    assert len(found) == inert
    assert not inert or "raise trainer.minibatches_per_step or trainer.passes_per_step" in found[0]


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("algorithm", "kl_estimator", "k1", {"kl_coefficient": 0.1}),
        ("algorithm", "tis_mode", "sequence_mask", {"tis_cap": 2.0}),
        ("algorithm", "overlong_penalty", 1.0, {"overlong_buffer_tokens": 9}),
        ("trainer", "decay_steps", 9, {"decay": "linear"}),
        ("trainer", "min_learning_rate", 1e-7, {"decay": "linear", "decay_steps": 9}),
    ],
)
def test_a_setting_that_another_one_switches_off_is_named(
    section: str, name: str, value: object, remedy: dict
) -> None:
    (found,) = warnings_of(**{section: {name: value}})
    assert found.startswith(f"{section}.{name} never acts: ")
    two = {"minibatches_per_step": 2}
    given = {section: {name: value} | remedy}
    assert warnings_of(**{"trainer": two} | given) == []


@pytest.mark.parametrize("rollout", [{"top_p": 0.9}, {"top_k": 50}])
def test_a_part_of_the_distribution_biases_the_ratio(rollout: dict) -> None:
    (found,) = warnings_of(rollout=rollout)
    assert "Train with top_p 1 and top_k 0" in found
    assert warnings_of(rollout={"validation": rollout}) == []
