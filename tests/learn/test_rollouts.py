"""Reading a batch of rollouts, and splitting it into minibatches and shares of ranks."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.learn.minibatch import plan_minibatches
from refrain.engines.learn.rollouts import choose_canaries, read_rollouts
from refrain.engines.store.tables import TRAINING

ROW = {
    "prompt_key": "a",
    "sample_index": 0,
    "prompt_token_ids": [1, 2],
    "response_token_ids": [3, 4],
    "inference_logprobs": [-1.0, -2.0],
    "reward": 1.0,
    "origin_step": 1,
    "group_rewards": [1.0, 3.0],
    "group_lengths": [2, 2],
    "version_spans": [{"policy_version": 0, "num_tokens": 2}],
    "truncated": False,
    "turns": [],
    "left_out": False,
    "experts": b"",
}
SHORT = {
    "response_token_ids": [7],
    "inference_logprobs": [-3.0],
    "version_spans": [{"policy_version": 4, "num_tokens": 1}],
    "group_lengths": [1, 2],
}


def table(*changes: dict) -> pa.Table:
    return pa.Table.from_pylist([ROW | change for change in changes], schema=TRAINING)


def test_order_of_rows_does_not_matter() -> None:
    changes = [
        {"prompt_key": "b", "prompt_token_ids": [9], "reward": 3.0},
        {"sample_index": 1} | SHORT,
        {},
    ]
    forward, backward = read_rollouts(table(*changes)), read_rollouts(table(*changes[::-1]))
    assert [rollout.group for rollout in forward] == [(1, "a"), (1, "a"), (1, "b")]
    assert [rollout.group for rollout in backward] == [(1, "a"), (1, "a"), (1, "b")]
    assert [rollout.sample_index for rollout in forward] == [0, 1, 0]
    assert [rollout.versions.tolist() for rollout in forward] == [[0, 0], [4], [0, 0]]
    assert [rollout.token_ids.tolist() for rollout in forward] == [
        [1, 2, 3, 4],
        [1, 2, 7],
        [9, 3, 4],
    ]
    assert [rollout.reward for rollout in forward] == [1.0, 1.0, 3.0]
    assert [rollout.reward for rollout in backward] == [1.0, 1.0, 3.0]
    assert choose_canaries(forward) == [[1, 2, 3, 4], [9, 3, 4]]


def test_a_slice_of_a_larger_table_is_read_right() -> None:
    rows = table({"prompt_token_ids": [5]}, {"prompt_key": "b"}, {"prompt_key": "c"}).slice(1)
    prompts = [rollout.token_ids[: rollout.num_prompt_tokens] for rollout in read_rollouts(rows)]
    assert [prompt.tolist() for prompt in prompts] == [[1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (table(), "empty"),
        (table({"reward": None}), "nulls in \\['reward'\\]"),
        (table({"prompt_token_ids": []}), "sample 0 of prompt a has no prompt"),
        (table({"inference_logprobs": [-1.0]}), "prompt a: 2 tokens"),
        (table({"response_token_ids": [], "inference_logprobs": []}), "0 tokens"),
        (table({"version_spans": []}), "2 tokens"),
        (table({}, {"prompt_key": "b", "reward": float("nan")}), "prompt b is not in its group"),
        (table({"group_rewards": [2.0, 3.0]}), "not in its group"),
        (table({"group_lengths": [1, 2]}), "not in its group"),
        (table({"turns": None}), "nulls in \\['turns'\\]"),
        (table({"turns": [{"num_sampled": 2, "num_observed": 1}]}), "do not cover its 2 tokens"),
        (table({"turns": [{"num_sampled": 1, "num_observed": 1}]}), "prompt a: 1 tokens"),
    ],
)
def test_malformed_batches_are_a_bug(bad: pa.Table, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        read_rollouts(bad)


def test_a_slice_of_spans_is_read_right() -> None:
    spans = [{"policy_version": 3, "num_tokens": 1}, {"policy_version": 5, "num_tokens": 1}]
    rows = table({"version_spans": spans[:1] * 2}, {"version_spans": spans}).slice(1)
    assert read_rollouts(rows)[0].versions.tolist() == [3, 5]


def test_a_slice_of_turns_is_read_right() -> None:
    talk = {
        "turns": [{"num_sampled": 1, "num_observed": 1}, {"num_sampled": 1}],
        "response_token_ids": [3, 4, 5],
    }
    rows = table({"turns": [{"num_sampled": 2}]}, talk, {"prompt_key": "c"}).slice(1)
    masks = [rollout.sampled for rollout in read_rollouts(rows)]
    assert [None if mask is None else mask.tolist() for mask in masks] == [
        [True, False, True],
        None,
    ]


def test_a_deferred_sample_is_of_another_group() -> None:
    groups = [rollout.group for rollout in read_rollouts(table({"origin_step": 2}, {}))]
    assert groups == [(1, "a"), (2, "a")]
    assert len(plan_minibatches(groups, 5, (0,))) == 2


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 4)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(0, 9),
)
def test_minibatches_are_disjoint_shares_of_whole_groups(
    groups: list[tuple[int, int]], num_minibatches: int, seed: int
) -> None:
    keys = [(step, f"prompt{prompt}") for step, prompt in groups]
    shares = plan_minibatches(keys, num_minibatches, (seed, 3))
    assert shares == plan_minibatches(keys, num_minibatches, (seed, 3))
    assert len(shares) == min(num_minibatches, len(set(keys)))
    assert sorted(sample for share in shares for sample in share) == list(range(len(keys)))
    homes = [{keys[sample] for sample in share} for share in shares]
    assert sum(map(len, homes)) == len(set(keys))


def test_minibatches_differ_between_steps() -> None:
    keys = [(1, f"prompt{index}") for index in range(16)]
    assert plan_minibatches(keys, 2, (0, 1)) != plan_minibatches(keys, 2, (0, 2))
