"""Which tokens count, by their version and by their group, and what a response is worth."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.learn.lessons import Lessons, read_lessons
from engines.learn.rollouts import Group, Rollouts
from engines.learn.staleness import StalenessError, fresh_tokens
from schemas.algorithm import AlgorithmConfig

VERSION = 7
Versions = Sequence[int]


def make_rollouts(
    versions: Sequence[Versions],
    origin_steps: Sequence[int] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
) -> Rollouts:
    """Samples with these versions of their tokens; the first of `rewards` is the sample's own."""
    origins = origin_steps or [VERSION + 1] * len(versions)
    groups = [list(group) for group in rewards or [[1.0, 0.0]] * len(versions)]
    return Rollouts(
        groups=[Group(origin, f"prompt{at}") for at, origin in enumerate(origins)],
        sample_indices=[at + 10 for at in range(len(versions))],
        prompts=[np.ones(1, np.int32) for _ in versions],
        responses=[np.ones(len(tokens), np.int32) for tokens in versions],
        inference_logprobs=[np.zeros(len(tokens), np.float32) for tokens in versions],
        rewards=np.array([group[0] for group in groups]),
        group_rewards=[np.array(group) for group in groups],
        group_lengths=[
            np.full(len(group), len(tokens), np.int32)
            for group, tokens in zip(groups, versions, strict=True)
        ],
        versions=[np.array(tokens, np.int32) for tokens in versions],
    )


def lessons_of(rollouts: Rollouts, **algorithm: object) -> Lessons:
    return read_lessons(
        rollouts,
        AlgorithmConfig.model_validate(algorithm),
        policy_version=VERSION,
        max_staleness=1,
        max_response_tokens=10,
    )


@given(
    st.lists(st.lists(st.integers(0, VERSION), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_deferred_samples_are_trained_where_they_are_fresh(
    versions: list[list[int]], max_staleness: int
) -> None:
    rollouts = make_rollouts(versions, [VERSION] * len(versions))
    fresh = fresh_tokens(rollouts, VERSION, max_staleness)
    expected = [[VERSION - version <= max_staleness for version in own] for own in versions]
    assert [mask.tolist() for mask in fresh] == expected


def test_what_was_planned_for_this_step_must_be_fresh() -> None:
    versions, origins = [[6, 7], [5, 7]], [VERSION + 1, VERSION + 1]
    with pytest.raises(
        StalenessError, match=r"sample 11 of prompt prompt1, planned for step 8"
    ) as e:
        fresh_tokens(make_rollouts(versions, origins), VERSION, 1)
    assert "versions 5 to 7; policy version 7 is trained on versions 6 to 7" in str(e.value)
    assert isinstance(e.value, ValueError)
    assert fresh_tokens(make_rollouts(versions, [8, 7]), VERSION, 1)[1].tolist() == [False, True]
    assert fresh_tokens(make_rollouts(versions, origins), VERSION, 2)[1].all()


@pytest.mark.parametrize("origin_step", [VERSION, VERSION + 1])
def test_no_sample_may_be_of_a_later_version(origin_step: int) -> None:
    with pytest.raises(StalenessError, match="versions 7 to 8"):
        fresh_tokens(make_rollouts([[7, 8]], [origin_step]), VERSION, 1)


def test_ages_are_measured_on_the_tokens_that_are_trained() -> None:
    lessons = lessons_of(make_rollouts([[4, 6, 7, 7], [3]], [VERSION, VERSION]))
    assert lessons.trained == [0]
    assert lessons.metrics == pytest.approx(
        {"actor/staleness_mean": 1 / 3, "actor/masked_tokens": 2 / 5}
    )


def test_a_batch_without_a_fresh_token_teaches_nothing() -> None:
    lessons = lessons_of(make_rollouts([[4], [3]], [VERSION, VERSION]))
    assert lessons.trained == []
    assert lessons.metrics == {"actor/staleness_mean": 0.0, "actor/masked_tokens": 1.0}


def test_dynamic_sampling_leaves_out_groups_of_equal_rewards() -> None:
    rollouts = make_rollouts([[7], [7], [7]], rewards=[[1.0, 1.0], [1.0, 0.0], [0.0]])
    lessons = lessons_of(rollouts, dynamic_sampling=True)
    assert lessons.trained == [1]
    assert lessons.metrics["actor/filtered_samples"] == pytest.approx(2 / 3)
    assert lessons_of(rollouts).trained == [0, 1, 2]


def test_a_length_alone_does_not_make_a_group_useful() -> None:
    rollouts = make_rollouts([[7] * 10], rewards=[[1.0, 1.0]])
    rollouts.group_lengths[0][:] = [10, 1]
    punished = {"overlong_buffer_tokens": 4}
    assert lessons_of(rollouts, **punished).advantages[0] < 0
    assert lessons_of(rollouts, **punished, dynamic_sampling=True).trained == []


def test_the_overlong_punishment_comes_before_the_groups_mean() -> None:
    rollouts = make_rollouts([[7] * 9], rewards=[[2.0, 1.0, 0.0]])
    rollouts.group_lengths[0][:] = [9, 10, 1]
    settings = {"overlong_buffer_tokens": 4, "overlong_penalty": 2.0, "normalise_by_std": False}
    # From 6 tokens on each costs 0.5: rewards 2 - 1.5, 1 - 2 and 0.
    mean = (0.5 - 1.0 + 0.0) / 3
    assert lessons_of(rollouts, **settings).advantages.tolist() == pytest.approx([0.5 - mean])
