"""The tables of a run's store, as SQL and as Arrow.

A row is found by (split, step, prompt_key, sample_index) wherever it appears: the primary key
holds whatever is retried, because every insert skips the rows that are there already.
"""

import pyarrow as pa

SCHEMA_VERSION = 6

CREATE = """
CREATE TABLE rollouts (
    split VARCHAR NOT NULL,
    step INTEGER NOT NULL,                   -- that trains on it
    origin_step INTEGER NOT NULL,            -- whose plan drew it; one less when it was deferred
    epoch INTEGER NOT NULL,
    prompt_key VARCHAR NOT NULL,
    sample_index INTEGER NOT NULL,           -- -1 - index when it was deferred
    response_token_ids INTEGER[] NOT NULL,
    inference_logprobs FLOAT[] NOT NULL,
    response_tokens INTEGER NOT NULL,
    finish_reason VARCHAR NOT NULL,
    engine INTEGER NOT NULL,
    drafter VARCHAR NOT NULL,                -- who drafted for it when it finished
    policy_version INTEGER NOT NULL,         -- lowest of the spans
    last_policy_version INTEGER NOT NULL,    -- highest of the spans
    version_spans STRUCT(policy_version INTEGER, num_tokens INTEGER)[] NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    num_accepted_tokens INTEGER NOT NULL,
    num_verifications INTEGER NOT NULL,
    num_rejections INTEGER,                  -- verifications that rejected a draft token
    started_s DOUBLE NOT NULL,               -- Unix time
    finished_s DOUBLE NOT NULL,
    PRIMARY KEY (split, step, prompt_key, sample_index)
);

CREATE TABLE prompts (
    prompt_key VARCHAR PRIMARY KEY,
    prompt_token_ids INTEGER[] NOT NULL
);

CREATE TABLE rewards (
    split VARCHAR NOT NULL,
    step INTEGER NOT NULL,
    prompt_key VARCHAR NOT NULL,
    sample_index INTEGER NOT NULL,
    reward DOUBLE NOT NULL CHECK (isfinite(reward)),
    extra JSON NOT NULL,
    PRIMARY KEY (split, step, prompt_key, sample_index)
);

CREATE TABLE plans (
    split VARCHAR NOT NULL,
    step INTEGER NOT NULL,
    plan JSON NOT NULL,                      -- schemas.step.StepPlan
    PRIMARY KEY (split, step)
);

CREATE TABLE outcomes (
    split VARCHAR NOT NULL,
    step INTEGER NOT NULL,
    outcome JSON NOT NULL,                   -- schemas.step.RolloutOutcome
    PRIMARY KEY (split, step)
);

CREATE TABLE stages (
    split VARCHAR NOT NULL,
    step INTEGER NOT NULL,
    batch JSON NOT NULL,                     -- schemas.step.RolloutBatch
    PRIMARY KEY (split, step)
);

CREATE TABLE learnt (                        -- what drafting knew after its rollouts
    step INTEGER NOT NULL,
    engine INTEGER NOT NULL,
    state JSON NOT NULL,                     -- schemas.counts.DraftingCounts.learnt
    PRIMARY KEY (step, engine)
);

CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    reward_mean DOUBLE NOT NULL,
    step_s DOUBLE,                           -- wall seconds of the whole step
    report JSON NOT NULL                     -- schemas.step.StepReport
);

CREATE TABLE archives (                      -- what has left this file: engines.store.archive
    name VARCHAR PRIMARY KEY,                -- of the folder
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    num_rollouts BIGINT NOT NULL,            -- of split train
    num_tokens BIGINT NOT NULL               -- of their responses
);

CREATE TABLE archived_groups (               -- of each prompt's last two steps there
    split VARCHAR NOT NULL,
    prompt_key VARCHAR NOT NULL,
    origin_step INTEGER NOT NULL,
    lengths INTEGER[] NOT NULL,              -- response tokens
    num_scored INTEGER NOT NULL,
    passes INTEGER[]                         -- forward passes of each; unknown in older archives
);

CREATE TABLE archived_drafts (               -- of the last policy versions there
    drafter VARCHAR NOT NULL,
    policy_version INTEGER NOT NULL,
    drafted BIGINT NOT NULL,                 -- draft tokens that were verified
    accepted BIGINT NOT NULL,
    rejections BIGINT                        -- verifications that rejected one
);
"""

ADDED = """
ALTER TABLE archived_groups ADD COLUMN IF NOT EXISTS passes INTEGER[];
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS num_rejections INTEGER;
ALTER TABLE archived_drafts ADD COLUMN IF NOT EXISTS rejections BIGINT;
"""
"""Columns that stores of this version may lack."""

_SAMPLE = {"prompt_key": pa.string(), "sample_index": pa.int32()}
_RESPONSE = {"response_token_ids": pa.list_(pa.int32())}
_TOKENS = {"prompt_token_ids": pa.list_(pa.int32())} | _RESPONSE
_REWARD = {"reward": pa.float64()}

SCORING = pa.schema(_SAMPLE | _RESPONSE)
"""Columns that a scorer reads."""

REWARDS = pa.schema(_SAMPLE | _REWARD | {"extra": pa.string()})
"""Columns that a scorer gives back; `extra` is a JSON object."""

INDEXED = pa.schema({"prompt_key": pa.string(), "step": pa.int32()} | _TOKENS | _REWARD)
"""Columns that a history index is built from."""

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
    }
)
"""A rewarded batch, one row per rollout: what the store gives and the trainer reads.

`inference_logprobs` are under softmax(logits / T). `origin_step` is the step whose plan drew the
sample: this one, or an earlier one for a sample that was deferred. `group_rewards` and
`group_lengths` (response tokens) are of all known samples of its (origin_step, prompt_key) in one
order, its own among them, in this batch or an earlier one. `version_spans` cover the response from
its beginning. `truncated`: cut at the limit of its length.
"""
