"""Which tokens count, by their version and by their group, and what a response is worth."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.learn.lessons import Lesson, StalenessError, fresh_tokens, read_lessons
from engines.learn.rollouts import ScoredRollout
from schemas.config import TrainConfig

VERSION = 7
Versions = Sequence[int]


def make_rollouts(
    versions: Sequence[Versions],
    origin_steps: Sequence[int] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
) -> list[ScoredRollout]:
    """Samples with these versions of their tokens; the first of `rewards` is the sample's own."""
    origins = origin_steps or [VERSION + 1] * len(versions)
    groups = [list(group) for group in rewards or [[1.0, 0.0]] * len(versions)]
    return [
        ScoredRollout(
            token_ids=np.ones(1 + len(tokens), np.int32),
            num_prompt_tokens=1,
            origin_step=origin,
            prompt_key=f"prompt{at}",
            sample_index=at + 10,
            inference_logprobs=np.zeros(len(tokens), np.float32),
            versions=np.array(tokens, np.int32),
            reward=group[0],
            group_rewards=np.array(group),
            group_lengths=np.full(len(group), len(tokens), np.int32),
        )
        for at, (tokens, origin, group) in enumerate(zip(versions, origins, groups, strict=True))
    ]


def lessons_of(
    rollouts: list[ScoredRollout], **algorithm: object
) -> tuple[list[Lesson], dict[str, float]]:
    """Lessons in a pipelined run, whose tokens may be one version old."""
    config = {
        "mode": "pipelined",
        "model": {"path": "unused"},
        "data": {"train": ["unused"], "max_response_tokens": 10},
        "algorithm": algorithm,
    }
    return read_lessons(rollouts, TrainConfig.model_validate(config), VERSION)


def trained(lessons: list[Lesson]) -> list[int]:
    return [at for at, lesson in enumerate(lessons) if lesson.counted.any()]


@given(
    st.lists(st.lists(st.integers(0, VERSION), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_deferred_samples_are_trained_where_they_are_fresh(
    versions: list[list[int]], max_staleness: int
) -> None:
    rollouts = make_rollouts(versions, [VERSION] * len(versions))
    fresh = [fresh_tokens(rollout, VERSION, max_staleness) for rollout in rollouts]
    expected = [[VERSION - version <= max_staleness for version in own] for own in versions]
    assert [mask.tolist() for mask in fresh] == expected


def test_what_was_planned_for_this_step_must_be_fresh() -> None:
    versions, origins = [[6, 7], [5, 7]], [VERSION + 1, VERSION + 1]
    with pytest.raises(
        StalenessError, match=r"sample 11 of prompt prompt1, planned for step 8"
    ) as e:
        fresh_tokens(make_rollouts(versions, origins)[1], VERSION, 1)
    assert "versions 5 to 7; policy version 7 is trained on versions 6 to 7" in str(e.value)
    assert isinstance(e.value, ValueError)
    assert fresh_tokens(make_rollouts(versions, [8, 7])[1], VERSION, 1).tolist() == [False, True]
    assert fresh_tokens(make_rollouts(versions, origins)[1], VERSION, 2).all()


@pytest.mark.parametrize("origin_step", [VERSION, VERSION + 1])
def test_no_sample_may_be_of_a_later_version(origin_step: int) -> None:
    with pytest.raises(StalenessError, match="versions 7 to 8"):
        fresh_tokens(make_rollouts([[7, 8]], [origin_step])[0], VERSION, 1)


def test_ages_are_measured_on_the_tokens_that_are_trained() -> None:
    lessons, metrics = lessons_of(make_rollouts([[4, 6, 7, 7], [3]], [VERSION, VERSION]))
    assert trained(lessons) == [0]
    assert metrics == pytest.approx({"actor/staleness_mean": 1 / 3, "actor/masked_tokens": 2 / 5})


def test_a_batch_without_a_fresh_token_teaches_nothing() -> None:
    lessons, metrics = lessons_of(make_rollouts([[4], [3]], [VERSION, VERSION]))
    assert trained(lessons) == []
    assert metrics == {"actor/staleness_mean": 0.0, "actor/masked_tokens": 1.0}


def test_dynamic_sampling_leaves_out_groups_of_equal_rewards() -> None:
    rollouts = make_rollouts([[7], [7], [7]], rewards=[[1.0, 1.0], [1.0, 0.0], [0.0]])
    lessons, metrics = lessons_of(rollouts, dynamic_sampling=True)
    assert trained(lessons) == [1]
    assert metrics["actor/filtered_samples"] == pytest.approx(2 / 3)
    assert trained(lessons_of(rollouts)[0]) == [0, 1, 2]


def test_a_length_alone_does_not_make_a_group_useful() -> None:
    rollouts = make_rollouts([[7] * 10], rewards=[[1.0, 1.0]])
    rollouts[0].group_lengths[:] = [10, 1]
    punished = {"overlong_buffer_tokens": 4}
    (lesson,), _ = lessons_of(rollouts, **punished)
    assert lesson.advantage < 0
    assert trained(lessons_of(rollouts, **punished, dynamic_sampling=True)[0]) == []


def test_the_overlong_punishment_comes_before_the_groups_mean() -> None:
    rollouts = make_rollouts([[7] * 9], rewards=[[2.0, 1.0, 0.0]])
    rollouts[0].group_lengths[:] = [9, 10, 1]
    settings = {"overlong_buffer_tokens": 4, "overlong_penalty": 2.0, "normalise_by_std": False}
    # From 6 tokens on each costs 0.5: rewards 2 - 1.5, 1 - 2 and 0.
    mean = (0.5 - 1.0 + 0.0) / 3
    (lesson,), _ = lessons_of(rollouts, **settings)
    assert lesson.advantage == pytest.approx(0.5 - mean)
