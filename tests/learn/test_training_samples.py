"""Training samples: which tokens the trainer counts, and the advantage of each response."""

from collections.abc import Collection, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.learn.rollouts import ScoredRollout
from refrain.engines.learn.training_samples import (
    StalenessError,
    TrainingSample,
    check_versions,
    read_training_samples,
)
from refrain.schemas.config import TrainConfig

VERSION = 7
Versions = Sequence[int]


def make_rollouts(
    versions: Sequence[Versions],
    origin_steps: Sequence[int] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
    truncated: Collection[int] = (),
) -> list[ScoredRollout]:
    """Return samples whose tokens have these policy versions. `rewards`: the rewards of each
    sample's group, its own first."""
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
            truncated=at in truncated,
        )
        for at, (tokens, origin, group) in enumerate(zip(versions, origins, groups, strict=True))
    ]


def samples_of(
    rollouts: list[ScoredRollout], **algorithm: object
) -> tuple[list[TrainingSample], dict[str, float]]:
    """Return the samples of a pipelined run. Its tokens may be one version old."""
    config = {
        "staleness": 1,
        "model": {"path": "unused"},
        "data": {"train": ["unused"], "max_response_tokens": 10},
        "algorithm": algorithm,
    }
    return read_training_samples(rollouts, TrainConfig.model_validate(config), VERSION)


def trained(samples: list[TrainingSample]) -> list[int]:
    return [at for at, sample in enumerate(samples) if sample.counted.any()]


@given(
    st.lists(st.integers(0, VERSION + 2), min_size=1, max_size=6),
    st.integers(VERSION - 2, VERSION + 2),
    st.integers(0, 3),
)
def test_tokens_are_as_old_as_the_step_that_drew_their_sample_admits(
    versions: list[int], origin_step: int, max_staleness: int
) -> None:
    """The limit counts from the step that drew the sample. A sample can be deferred by one step."""
    (rollout,) = make_rollouts([versions], [origin_step])
    admitted = origin_step in (VERSION, VERSION + 1) and all(
        origin_step - 1 - max_staleness <= version <= VERSION for version in versions
    )
    if admitted:
        check_versions(rollout, VERSION, max_staleness)
        return
    with pytest.raises(StalenessError, match=f"planned for step {origin_step}"):
        check_versions(rollout, VERSION, max_staleness)


def test_a_deferred_sample_is_trained_on_whole() -> None:
    """The trainer counts all tokens, including those generated before the sample was deferred."""
    samples, metrics = samples_of(make_rollouts([[5, 5, 6], [6, 6]], [VERSION, VERSION + 1]))
    assert [sample.counted.all() for sample in samples] == [True, True]
    assert metrics["actor/staleness_mean"] == pytest.approx((2 + 2 + 1 + 1 + 1) / 5)


def test_truncated_responses_are_filtered_on_request() -> None:
    rollouts = make_rollouts([[7] * 10, [7] * 10], rewards=[[0.0, 1.0]] * 2, truncated=[1])
    samples, metrics = samples_of(rollouts, overlong_filtering=True)
    assert trained(samples) == [0]
    assert metrics["actor/overlong_samples"] == 0.5
    assert samples[0].advantage != 0.0, "the group mean needs both rewards"
    samples, metrics = samples_of(rollouts)
    assert trained(samples) == [0, 1]
    assert "actor/overlong_samples" not in metrics
    both = samples_of(rollouts, overlong_filtering=True, dynamic_sampling=True)[0]
    assert trained(both) == [0]


def test_dynamic_sampling_leaves_out_groups_of_equal_rewards() -> None:
    rollouts = make_rollouts([[7], [7], [7]], rewards=[[1.0, 1.0], [1.0, 0.0], [0.0]])
    samples, metrics = samples_of(rollouts, dynamic_sampling=True)
    assert trained(samples) == [1]
    assert metrics["actor/filtered_samples"] == pytest.approx(2 / 3)
    assert trained(samples_of(rollouts)[0]) == [0, 1, 2]


def test_lengths_do_not_make_a_group_useful() -> None:
    rollouts = make_rollouts([[7] * 10], rewards=[[1.0, 1.0]])
    rollouts[0].group_lengths[:] = [10, 1]
    punished = {"overlong_buffer_tokens": 4}
    (sample,), _ = samples_of(rollouts, **punished)
    assert sample.advantage < 0
    assert trained(samples_of(rollouts, **punished, dynamic_sampling=True)[0]) == []


def test_rewards_before_and_after_the_punishment_are_told() -> None:
    """`critic/score` is the reward from the scorer. `critic/rewards` is less by the punishment."""
    rollouts = make_rollouts([[7] * 10, [7] * 2], rewards=[[1.0, 0.0], [0.0, 0.0]])
    _, metrics = samples_of(rollouts, overlong_buffer_tokens=4)
    figures = {"mean": 0.25, "max": 0.5, "min": 0.0, "std": 0.25}
    assert {n: metrics[f"critic/rewards/{n}"] for n in figures} == pytest.approx(figures)
    assert metrics["critic/zero_variance_share"] == 0.5


def test_spread_of_advantages_is_over_the_tokens_trained_on() -> None:
    rollouts = make_rollouts([[7] * 3, [7]], rewards=[[1.0, 0.0], [0.0, 1.0]])
    _, metrics = samples_of(rollouts, scale_rewards="none")
    figures = {"mean": 0.25, "max": 0.5, "min": -0.5, "std": np.std([0.5, 0.5, 0.5, -0.5])}
    assert {n: metrics[f"critic/advantages/{n}"] for n in figures} == pytest.approx(figures)


def test_a_batch_is_whitened_over_what_is_trained_on() -> None:
    """Mean and deviation leave out the group of equal rewards."""
    groups = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    rollouts = make_rollouts([[7], [7] * 3, [7] * 9], rewards=groups)
    samples, _ = samples_of(rollouts, scale_rewards="batch", dynamic_sampling=True)
    mean, deviation = -0.25, np.std([0.5, -0.5, -0.5, -0.5])
    expected = [(one - mean) / (deviation + 1e-6) for one in (0.5, -0.5)]
    assert [sample.advantage for sample in samples[:2]] == pytest.approx(expected)
