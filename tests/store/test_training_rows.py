"""Rows of a training step carry the rewards and lengths of each sample's group so far."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.learn.rollouts import read_rollouts
from engines.store.rows import rollout_rows
from engines.store.store import Store
from engines.store.tables import TRAINING
from schemas.rollout import FinishReason, Split
from tests.store.test_store import add_rollouts, make_rewards, make_rollout


class Sample(NamedTuple):
    """A sample that `step` trains on and `origin_step` planned."""

    step: int
    origin_step: int
    prompt: str
    index: int
    reward: float
    tokens: int = 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "run.duckdb") as store:
        yield store


def add(store: Store, sample: Sample) -> None:
    rollout = make_rollout(sample.step, sample.prompt, sample.index, sample.tokens)
    rows = rollout_rows([rollout]).drop_columns(["origin_step"])
    origin = pa.array([sample.origin_step], pa.int32())
    store.add_rollouts(rows.append_column("origin_step", origin), epoch=0)
    rewards = make_rewards([(sample.prompt, sample.index, sample.reward)])
    store.add_rewards(Split.TRAIN, sample.step, rewards)


def test_a_deferred_sample_knows_what_was_trained_before_it(store: Store) -> None:
    for sample in (
        Sample(1, 1, "a", 2, 0.5, tokens=4),
        Sample(1, 1, "a", 0, 1.0),
        Sample(2, 1, "a", 1, 3.0, tokens=7),
        Sample(2, 2, "a", 3, 9.0),
        Sample(2, 2, "b", 0, 8.0),
    ):
        add(store, sample)
    columns = ("prompt_key", "origin_step", "sample_index", "group_rewards", "group_lengths")

    def groups(step: int) -> list[tuple]:
        return [
            tuple(row[name] for name in columns) for row in store.training_rows(step).to_pylist()
        ]

    assert groups(1) == [("a", 1, 0, [1.0, 0.5], [3, 4]), ("a", 1, 2, [1.0, 0.5], [3, 4])]
    assert groups(2) == [
        ("a", 1, 1, [1.0, 3.0, 0.5], [3, 7, 4]),
        ("a", 2, 3, [9.0], [3]),
        ("b", 2, 0, [8.0], [3]),
    ]


def test_the_trainer_reads_what_the_store_gives(store: Store) -> None:
    add(store, Sample(1, 1, "a", 0, 1.0))
    rows = store.training_rows(1)
    assert rows.schema.equals(TRAINING)
    assert rows["version_spans"].to_pylist() == [[{"policy_version": 0, "num_tokens": 3}]]
    assert read_rollouts(rows)[0].versions.tolist() == [0, 0, 0]


def test_the_trainer_knows_which_responses_were_cut(store: Store) -> None:
    for index, reason in enumerate((FinishReason.LENGTH, FinishReason.STOP)):
        rollout = replace(make_rollout(1, "a", index), finish_reason=reason)
        add_rollouts(store, rollout)
    store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, 0.0), ("a", 1, 1.0)]))
    assert [one.truncated for one in read_rollouts(store.training_rows(1))] == [True, False]


def test_a_group_of_the_other_split_is_another(store: Store) -> None:
    add(store, Sample(1, 1, "a", 0, 1.0))
    add_rollouts(store, make_rollout(sample=1, split=Split.VALIDATION))
    store.add_rewards(Split.VALIDATION, 1, make_rewards([("a", 1, 5.0)]))
    assert store.training_rows(1)["group_rewards"].to_pylist() == [[1.0]]


samples = st.builds(
    lambda origin, late, prompt, index, reward: Sample(
        origin + late, origin, prompt, index, float(reward)
    ),
    st.integers(1, 3),
    st.integers(0, 1),
    st.sampled_from("ab"),
    st.integers(0, 3),
    st.integers(-5, 5),
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        samples,
        min_size=1,
        unique_by=(
            lambda s: (s.step, s.prompt, s.index),
            lambda s: (s.origin_step, s.prompt, s.index),
        ),
    )
)
def test_groups_equal_those_found_by_hand(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Sample]
) -> None:
    with Store(tmp_path_factory.mktemp("store") / "run.duckdb") as store:
        for sample in drawn:
            add(store, sample)
        for step in {sample.step for sample in drawn}:
            for row in store.training_rows(step).to_pylist():
                group = sorted(
                    (other.index, other.reward)
                    for other in drawn
                    if (other.origin_step, other.prompt) == (row["origin_step"], row["prompt_key"])
                    and other.step <= step
                )
                assert row["group_rewards"] == [reward for _, reward in group]
