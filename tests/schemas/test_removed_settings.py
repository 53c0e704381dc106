"""Old names of settings: accepted for a minor version, then refused; replaced in a run's record."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.engines.user_files import validated
from refrain.flows.cli import main
from refrain.flows.config_file import load_config, override
from refrain.schemas.algorithm import AlgorithmConfig
from refrain.schemas.config import TrainConfig
from refrain.schemas.removed_settings import (
    REMOVED,
    RENAMED,
    Removed,
    Renamed,
    accept_renamed,
    current_settings,
    removed_changes,
)
from refrain.schemas.settings import declared_settings
from refrain.schemas.version import OldNameWarning
from tests.conftest import REPOSITORY

GIVEN = {"model": {"path": "m"}, "data": {"train": ["d"]}}
NAMES = {setting.name for setting in declared_settings(TrainConfig)}


def given(name: str, value: object) -> dict:
    """Return a config's values with one more setting."""
    section, _, last = name.rpartition(".")
    return GIVEN | ({section: {last: value}} if section else {last: value})


OLD = [(renamed, old) for renamed in RENAMED for old in renamed.old]
VALUES = {
    "rollout.weights": ("ipc", "ipc"),
    "histopipe.oversample": (0.25, 0.25),
    "algorithm.normalise_by_std": (False, "none"),
    "algorithm.std_over": ("batch", "batch"),
    "algorithm.tis_level": ("sequence", "sequence_truncate"),
    "algorithm.tis_reject": (True, "token_mask"),
    "mode": ("pipelined", 1),
    "histopipe.enabled": (False, "even"),
}
"""An old value of each renamed setting, and the new one."""


def value_of(values: object, name: str) -> object:
    for part in name.split("."):
        values = values.get(part) if isinstance(values, dict) else getattr(values, part)
    return values


@pytest.mark.parametrize(("renamed", "old"), OLD, ids=[old for _, old in OLD])
def test_an_old_name_is_accepted_for_a_minor_version(renamed: Renamed, old: str) -> None:
    value, new_value = VALUES[old]
    values = given(old, value)
    with pytest.warns(OldNameWarning, match=rf"{old} is now .*{renamed.new}.* refuses it"):
        accepted = accept_renamed(values, f"{renamed.since}.7")
    assert value_of(accepted, renamed.new) == new_value
    assert values == given(old, value), "the given values were changed"
    major, minor = map(int, renamed.since.split("."))
    with pytest.raises(ValueError, match=rf"{old} is now .*{renamed.new}"):
        accept_renamed(values, f"{major}.{minor + 1}.0")
    assert value_of(current_settings(values), renamed.new) == new_value
    assert not list(removed_changes(values))
    assert (old in NAMES, renamed.new in NAMES) == (False, True)


def test_the_page_about_stable_names_lists_them() -> None:
    page = (REPOSITORY / "docs" / "stability.md").read_text()
    for one in RENAMED:
        olds = ", ".join(f"`{old}`" for old in one.old)
        assert f"| {olds} | `{one.new}` | {one.since} |" in page
    line = re.search(r"^warning: (.*)$", page, re.MULTILINE)
    assert line
    with pytest.warns(OldNameWarning, match=rf"^{re.escape(line[1])}$"):
        accept_renamed(given("rollout.weights", "ipc"))


@pytest.mark.parametrize("old", VALUES)
def test_a_wrong_value_under_an_old_name_is_refused(old: str) -> None:
    with pytest.warns(OldNameWarning), pytest.raises(ValueError, match=r"Input should be"):
        validated(given(old, "typo"), "run.yaml", TrainConfig)


def test_an_old_name_works_in_files_and_overrides_and_prints_one_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: m}\ndata: {train: [d]}\nhistopipe:\n  enabled: false\n")
    done = CliRunner().invoke(main, ["config", str(file), "rollout.weights=ipc"])
    assert done.exit_code == 0, done.output
    warned = [line for line in done.stderr.splitlines() if line]
    assert [line.split(" is now ")[0] for line in warned] == [
        "warning: rollout.weights",
        "warning: histopipe.enabled",
    ]
    assert "weight_sync: ipc" in done.stdout
    with pytest.warns(OldNameWarning):
        config = load_config(file)
    assert config.rollout.placement == "even"
    with pytest.warns(OldNameWarning):
        assert override(config, ["rollout.weights=ipc"]).rollout.weight_sync == "ipc"


def two_names() -> Iterator[dict]:
    yield GIVEN | {"rollout": {"weights": "ipc", "weight_sync": "file"}}
    yield GIVEN | {"mode": "sync", "staleness": 0}


@pytest.mark.parametrize("values", two_names())
def test_two_names_of_one_setting_are_refused(values: dict) -> None:
    with pytest.raises(ValueError, match=r"is the old name of \S+: give the new one only"):
        validated(values, "run.yaml", TrainConfig)


@pytest.mark.parametrize("section", [None, 5])
def test_the_section_of_a_new_name_may_be_empty_but_nothing_else(section: object) -> None:
    values = GIVEN | {"histopipe": {"oversample": 0.25}, "rollout": section}
    if section is None:
        with pytest.warns(OldNameWarning):
            assert TrainConfig.model_validate(values).rollout.oversample == 0.25
    else:
        with pytest.warns(OldNameWarning), pytest.raises(ValueError, match="rollout is a section"):
            TrainConfig.model_validate(values)


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
    ("old", "new"),
    [
        ({"normalise_by_std": True, "std_over": "batch"}, {"scale_rewards": "batch"}),
        ({"normalise_by_std": False, "std_over": "group"}, {"scale_rewards": "none"}),
        ({"normalise_by_std": True}, {"scale_rewards": "group"}),
        ({"tis_level": "sequence", "tis_reject": True}, {"tis_mode": "sequence_mask"}),
        ({"tis_level": "token", "tis_reject": False}, {"tis_mode": "token_truncate"}),
    ],
)
def test_settings_that_are_one_now_are_converted(old: dict, new: dict) -> None:
    recorded = GIVEN | {"algorithm": old}
    assert current_settings(recorded) == GIVEN | {"algorithm": new}
    assert not list(removed_changes(recorded))


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
