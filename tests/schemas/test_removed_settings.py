"""Old names of settings: refused in a config, replaced in the record of a run."""

import pytest

from refrain.engines.user_files import validated
from refrain.schemas.algorithm import AlgorithmConfig
from refrain.schemas.config import TrainConfig
from refrain.schemas.removed_settings import (
    MERGED,
    REMOVED,
    RENAMED,
    Removed,
    current_settings,
    removed_changes,
)
from refrain.schemas.settings import declared_settings

GIVEN = {"model": {"path": "m"}, "data": {"train": ["d"]}}
NAMES = {setting.name for setting in declared_settings(TrainConfig)}


def given(name: str, value: object) -> dict:
    """Return a config's values with one more setting."""
    section, _, last = name.rpartition(".")
    return GIVEN | ({section: {last: value}} if section else {last: value})


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_refused_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ValueError, match=rf"{old} is now {new}: rename it"):
        validated(given(old, 1), "run.yaml", TrainConfig)
    current = current_settings(given(old, 1))
    assert {name: value for name, value in current.items() if value != {}} == given(new, 1)
    assert not list(removed_changes(given(old, 1)))
    assert (old in NAMES, new in NAMES) == (False, True)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_refused_with_the_reason(name: str) -> None:
    value = REMOVED[name].value
    with pytest.raises(ValueError, match=rf"{name} is gone: \S.*\. Leave it out"):
        validated(given(name, value), "run.yaml", TrainConfig)
    recorded = given(name, value)
    assert not current_settings(recorded).get(name.partition(".")[0])
    assert recorded == given(name, value), "the record was changed"
    assert not list(removed_changes(recorded)), "it has the value that every run has now"
    (change,) = removed_changes(given(name, "another"))
    assert (change.name, change.before, change.after) == (name, "another", value)
    assert change.on_resume is REMOVED[name].on_resume
    assert name not in NAMES


@pytest.mark.parametrize(
    ("old", "value", "new", "converted"),
    [
        ("mode", "pipelined", "staleness", 1),
        ("mode", "sync", "staleness", 0),
        ("histopipe.enabled", False, "rollout.placement", "even"),
        ("histopipe.enabled", True, "rollout.placement", "histopipe"),
    ],
)
def test_a_recorded_value_is_converted(old, value, new, converted) -> None:
    current = TrainConfig.model_validate(current_settings(given(old, value)))
    for part in new.split("."):
        current = getattr(current, part)
    assert current == converted
    with pytest.raises(ValueError, match=rf"{old} is now part of {new}"):
        validated(given(old, value), "run.yaml", TrainConfig)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"normalise_by_std": True, "std_over": "batch"}, {"scale_rewards": "batch"}),
        ({"normalise_by_std": False, "std_over": "group"}, {"scale_rewards": "none"}),
        ({"normalise_by_std": True}, {"scale_rewards": "group"}),
        ({"tis_level": "sequence", "tis_reject": True}, {"tis_mode": "sequence_mask"}),
        ({"tis_level": "token", "tis_reject": False}, {"tis_mode": "token_truncate"}),
    ],
)
def test_settings_that_are_one_now_are_refused_and_converted(old: dict, new: dict) -> None:
    recorded = GIVEN | {"algorithm": old}
    name, example = next((one.new, one.example) for one in MERGED if one.new[10:] in new)
    with pytest.raises(ValueError, match=f"{next(iter(old))} is now part of {name}: {example}"):
        validated(recorded, "run.yaml", TrainConfig)
    assert current_settings(recorded) == GIVEN | {"algorithm": new}
    assert not list(removed_changes(recorded))
    assert NAMES.isdisjoint(one for merged in MERGED for one in merged.old)


@pytest.mark.parametrize(("name", "removed"), [(n, r) for n, r in REMOVED.items() if r.by_type])
def test_a_removed_setting_has_the_value_that_the_type_picks(name: str, removed: Removed) -> None:
    for type_, value in removed.by_type.items():
        recorded = given(name, value)
        recorded["algorithm"]["type"] = type_
        assert not list(removed_changes(recorded))
        (change,) = removed_changes(given(name, value))
        assert (change.before, change.after) == (value, removed.value)
        now = AlgorithmConfig.model_validate({"type": type_})
        assert value in (now.baseline, {"gspo": "sequence"}.get(now.policy_loss))


def test_all_old_names_are_listed_at_once() -> None:
    values = GIVEN | {"drafting": {"profile": "a"}, "pat": {"profile": "b"}}
    with pytest.raises(ValueError, match=r"(?s)drafting\.profile is gone.*pat\.profile is gone"):
        validated(values, "run.yaml", TrainConfig)


def test_current_names_pass() -> None:
    values = GIVEN | {"profile": "mine", "drafting": {"max_draft": 9}}
    assert current_settings(values) == values
    assert not list(removed_changes(values))
    assert validated(values, "run.yaml", TrainConfig).profile == "mine"
