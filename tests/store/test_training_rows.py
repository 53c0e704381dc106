"""Rows of a training step carry the rewards and lengths of each sample's group so far."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, get_args

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.learn.rollouts import ScoredRollout, read_rollouts
from refrain.engines.learn.training_samples import read_training_samples
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.engines.store.tables import TRAINING
from refrain.schemas.algorithm import AlgorithmType
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import FinishReason, LengthHistory, Split
from tests.store.test_store import add_rollouts, make_plan, make_rewards, make_rollout


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


def add_groups(store: Store, groups: Mapping[str, Mapping[int, float | None]]) -> None:
    """Add groups of rewards by sample index. Sample i has i + 2 tokens. A conversation without a
    reward failed."""
    rewards = [(key, i, reward) for key, own in groups.items() for i, reward in own.items()]
    rollouts = [
        replace(
            make_rollout(1, prompt, index, index + 2),
            finish_reason=FinishReason.FAILED if reward is None else FinishReason.STOP,
        )
        for prompt, index, reward in rewards
    ]
    add_rollouts(store, *rollouts)
    known = [row for row in rewards if row[2] is not None]
    store.add_rewards(Split.TRAIN, 1, make_rewards(known))


def indexed(*rewards: float | None) -> dict[int, float | None]:
    return dict(enumerate(rewards))


def test_a_failed_conversation_is_left_out_of_its_group(store: Store) -> None:
    add_groups(
        store,
        {
            "a": indexed(1.0, None, 0.5),
            "b": indexed(None, None, 2.0),
            "c": indexed(None, None, None),
        },
    )
    store.add_plan(make_plan(["b", "c", "a"], group_size=3))
    columns = ("prompt_key", "sample_index", "reward", "left_out", "group_rewards", "group_lengths")
    rows = store.training_rows(1)
    assert [tuple(row[name] for name in columns) for row in rows.to_pylist()] == [
        ("b", 0, 0.0, True, [2.0], [4]),
        ("b", 1, 0.0, True, [2.0], [4]),
        ("b", 2, 2.0, True, [2.0], [4]),
        *(("c", index, 0.0, True, [], []) for index in range(3)),
        ("a", 0, 1.0, False, [1.0, 0.5], [2, 4]),
        ("a", 1, 0.0, True, [1.0, 0.5], [2, 4]),
        ("a", 2, 0.5, False, [1.0, 0.5], [2, 4]),
    ]
    assert [one.left_out for one in read_rollouts(rows)].count(False) == 2


def test_only_a_failed_conversation_may_lack_a_reward(store: Store) -> None:
    add_groups(store, {"a": indexed(1.0, None)})
    add_rollouts(store, make_rollout(sample=2))
    with pytest.raises(ValueError, match="1 rollouts have no reward, the first is train/1/a/2"):
        store.training_rows(1)


def test_the_only_sample_of_a_group_is_trained_on(store: Store) -> None:
    add_groups(store, {"a": indexed(1.0)})
    assert store.training_rows(1)["left_out"].to_pylist() == [False]


def test_lengths_of_failed_conversations_are_known(store: Store) -> None:
    add_groups(store, {"a": indexed(1.0, None, None)})
    assert store.length_history() == {"a": LengthHistory(3.0, 4, None, pytest.approx(9 / 4))}
    assert store.history_report().num_rollouts == 3
    assert store.rollouts(Split.TRAIN, 1, ["finish_reason"])["finish_reason"].to_pylist() == [
        "stop",
        "failed",
        "failed",
    ]


@pytest.fixture(scope="module")
def with_and_without(tmp_path_factory: pytest.TempPathFactory) -> list[list[ScoredRollout]]:
    """Return a step's rollouts with failed ones, and the same step without the failed ones and
    without the groups of which less than two are left."""
    random = Random(0)
    whole = {
        f"{at:02}": indexed(
            *(abs(random.gauss()) if random.random() < 0.4 else None for _ in range(4))
        )
        for at in range(12)
    }
    kept = {key: {i: r for i, r in own.items() if r is not None} for key, own in whole.items()}
    left = {key: own for key, own in kept.items() if len(own) > 1}
    assert {len(own) for own in kept.values()} >= {0, 1, 2}
    found = []
    for groups in (whole, left):
        with Store(tmp_path_factory.mktemp("store") / "run.duckdb") as store:
            add_groups(store, groups)
            found.append(read_rollouts(store.training_rows(1)))
    return found


@pytest.mark.parametrize("type", get_args(AlgorithmType))
def test_advantages_equal_those_without_the_failed(
    with_and_without: list[list[ScoredRollout]], type: str
) -> None:
    """Bit for bit, and all metrics with them."""
    data = {"train": ["t"], "max_response_tokens": 100}
    config = TrainConfig.model_validate(
        {"model": {"path": "m"}, "data": data, "algorithm": {"type": type}}
    )
    (samples, metrics), (others, same) = (
        read_training_samples(rollouts, config, 0) for rollouts in with_and_without
    )
    names = [(one.rollout.prompt_key, one.rollout.sample_index, one.advantage) for one in samples]
    assert names == [
        (one.rollout.prompt_key, one.rollout.sample_index, one.advantage) for one in others
    ]
    assert metrics == same
    assert len(with_and_without[0]) == 48 > len(samples) == len(others) > 4
    assert any(one.advantage for one in samples)


def test_which_rows_a_scorer_gets(store: Store) -> None:
    reasons = {"a": ["stop", "failed"], "b": ["failed"], "c": ["stop"]}
    for prompt, own in reasons.items():
        for index, reason in enumerate(own):
            rollout = make_rollout(1, prompt, index)
            add_rollouts(store, replace(rollout, finish_reason=FinishReason(reason)))

    def scored(**options: Any) -> list[tuple[str, int]]:
        rows = store.scoring_rows(Split.TRAIN, 1, **options).to_pylist()
        return [(row["prompt_key"], row["sample_index"]) for row in rows]

    assert scored() == [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    assert scored(leave_out=True) == [("a", 0), ("c", 0)]
    assert scored(num_finished=2) == [("a", 0), ("a", 1)]
    assert scored(num_finished=2, leave_out=True) == [("a", 0)]
