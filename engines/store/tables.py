"""Rows that leave the store or reach it, as Arrow (`engines.store.ddl` has the tables)."""

import pyarrow as pa

_SAMPLE = {"prompt_key": pa.string(), "sample_index": pa.int32()}
_RESPONSE = {"response_token_ids": pa.list_(pa.int32())}
_TOKENS = {"prompt_token_ids": pa.list_(pa.int32())} | _RESPONSE
_REWARD = {"reward": pa.float64()}

TURNS = pa.list_(
    pa.struct(
        {
            "num_sampled": pa.int32(),
            "num_observed": pa.int32(),
            "waited_s": pa.float64(),
            "score": pa.float64(),
            "num_calls": pa.int32(),
            "num_failed_calls": pa.int32(),
            "ended_s": pa.float64(),
            "num_draft_tokens": pa.int32(),
            "num_accepted_tokens": pa.int32(),
        }
    )
)
"""Turns of a conversation, with the fields of `schemas.rollout.Turn`. They cover all tokens of the
response. Empty without an environment."""

SCORING = pa.schema(
    _SAMPLE
    | _RESPONSE
    | {"turns": TURNS, "environment_score": pa.float64(), "finish_reason": pa.string()}
)
"""Columns that a scorer reads."""

REWARDS = pa.schema(_SAMPLE | _REWARD | {"extra": pa.string()})
"""Columns that a scorer returns; `extra` is a JSON object."""

INDEXED = pa.schema(
    {"prompt_key": pa.string(), "step": pa.int32()} | _TOKENS | _REWARD | {"turns": TURNS}
)
"""Columns from which the history index is built."""

SPANS = pa.list_(pa.struct({"policy_version": pa.int32(), "num_tokens": pa.int32()}))

TRAINING = pa.schema(
    _SAMPLE
    | _TOKENS
    | _REWARD
    | {
        "inference_logprobs": pa.list_(pa.float32()),
        "origin_step": pa.int32(),
        "group_rewards": pa.list_(pa.float64()),
        "group_lengths": pa.list_(pa.int32()),
        "version_spans": SPANS,
        "truncated": pa.bool_(),
        "turns": TURNS,
        "left_out": pa.bool_(),
        "experts": pa.large_binary(),
    }
)
"""The batch that the trainer reads, one row per rollout.

`inference_logprobs`: log-probabilities of the sampled tokens under softmax(logits / T).
`origin_step`: the step whose plan drew the sample; an earlier step for a deferred sample.
`group_rewards`, `group_lengths` (sampled tokens): all known samples of the row's group, that is of
its (origin_step, prompt_key). Both lists have the same order and include the row's own sample.
Samples of the group may be in this batch or in an earlier one.
`version_spans`: policy versions of the sampled tokens, from the first one on.
`truncated`: whether the response was cut because it had no room left.
`experts`: see `schemas.rollout.Generated`. Empty unless `trainer.routing_replay` is on.
`left_out`: whether the trainer leaves the row out. A failed conversation without a reward is not in
`group_rewards`, and its `reward` is 0.
"""
