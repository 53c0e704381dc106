"""A resumed run finds the records that steps are scheduled by, other than rollouts."""

from pathlib import Path

import pytest

from refrain.engines.store import records
from refrain.engines.store.store import Store
from refrain.schemas.rollout import Split
from refrain.schemas.step import RolloutBatch


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "run.duckdb") as store:
        yield store


def stage(step: int, num_tokens: int = 8, split: Split = Split.TRAIN) -> RolloutBatch:
    return RolloutBatch(
        split=split,
        step=step,
        policy_version=step - 1,
        num_rollouts=1,
        num_tokens=num_tokens,
        mean_response_tokens=num_tokens,
        max_response_tokens=num_tokens,
        clip_ratio=0.0,
        num_draft_tokens=6,
        num_accepted_tokens=4,
        generation_s=1.0,
        sync_s=0.5,
        canary_error=None,
        shares=(),
    )


def test_a_stage_is_found_by_its_step(store: Store):
    assert store.stage(Split.TRAIN, 1) is None
    for each in (stage(1, 9), stage(1), stage(2, 5), stage(1, 7, Split.VALIDATION)):
        store.add_stage(each)
    found = store.stage(Split.TRAIN, 1)
    assert found == stage(1)
    assert found.speculation == (2.0, 2)
    store.truncate_after(1, 1)
    assert store.stage(Split.TRAIN, 1) == stage(1)
    assert store.stage(Split.TRAIN, 2) is None


def test_a_run_that_is_resumed_knows_what_its_engines_knew_then(store: Store):
    assert store.learnt() == {}
    store.add_learnt(1, {0: '{"a": 1}', 1: '{"b": 1}'})
    store.add_learnt(2, {0: '{"a": 2}'})
    store.add_learnt(3, {0: '{"a": 3}', 1: '{"b": 3}'})
    assert store.learnt() == {0: '{"a": 3}', 1: '{"b": 3}'}
    store.truncate_after(2, 2)
    assert store.learnt() == {0: '{"a": 2}', 1: '{"b": 1}'}
    store.add_learnt(2, {0: '{"a": 4}'})
    assert store.learnt()[0] == '{"a": 4}'


def test_old_learnt_states_are_deleted(store: Store, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(records, "LEARNT_STEPS", 2)
    for step in range(1, 6):
        store.add_learnt(step, {0: f"{step}"})
    store.truncate_after(4, 4)
    assert store.learnt() == {0: "4"}
    store.truncate_after(3, 3)
    assert store.learnt() == {}
