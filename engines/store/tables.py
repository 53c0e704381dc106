"""The tables of a run's store, as SQL and as Arrow.

In every table of rollouts, (split, step, prompt_key, sample_index) is the primary key. Every insert
skips rows that are already present, so a retry adds nothing.
"""

import pyarrow as pa

SCHEMA_VERSION = 6

_TURNS = (
    "STRUCT(num_sampled INTEGER, num_observed INTEGER, waited_s DOUBLE, score DOUBLE, "
    "num_calls INTEGER, num_failed_calls INTEGER, ended_s DOUBLE, num_draft_tokens INTEGER, "
    "num_accepted_tokens INTEGER)[]"
)
"""Type of a conversation's turns (`schemas.rollout.Turn`)."""

CREATE = f"""
CREATE TABLE rollouts (
    split VARCHAR NOT NULL,
    step INTEGER NOT NULL,                   -- that trains on it
    origin_step INTEGER NOT NULL,            -- whose plan drew it; one less when it was deferred
    epoch INTEGER NOT NULL,
    prompt_key VARCHAR NOT NULL,
    sample_index INTEGER NOT NULL,           -- -1 - index when it was deferred
    response_token_ids INTEGER[] NOT NULL,   -- sampled and observed
    inference_logprobs FLOAT[] NOT NULL,     -- of the sampled tokens
    response_tokens INTEGER NOT NULL,        -- sampled
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
    turns {_TURNS} DEFAULT [],               -- empty without an environment
    observed_tokens INTEGER DEFAULT 0,       -- that the environment gave
    environment_score DOUBLE,                -- of the whole response
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
    passes INTEGER[],                        -- forward passes of each; unknown in older archives
    waits_s DOUBLE[],                        -- waits for environments; unknown in older archives
    observed INTEGER[]                       -- observed tokens; unknown in older archives
);

CREATE TABLE archived_drafts (               -- of the last policy versions there
    drafter VARCHAR NOT NULL,
    policy_version INTEGER NOT NULL,
    drafted BIGINT NOT NULL,                 -- draft tokens that were verified
    accepted BIGINT NOT NULL,
    rejections BIGINT                        -- verifications that rejected one
);
"""

ADDED = f"""
ALTER TABLE archived_groups ADD COLUMN IF NOT EXISTS passes INTEGER[];
ALTER TABLE archived_groups ADD COLUMN IF NOT EXISTS waits_s DOUBLE[];
ALTER TABLE archived_groups ADD COLUMN IF NOT EXISTS observed INTEGER[];
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS num_rejections INTEGER;
ALTER TABLE archived_drafts ADD COLUMN IF NOT EXISTS rejections BIGINT;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turns {_TURNS} DEFAULT [];
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS observed_tokens INTEGER DEFAULT 0;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS environment_score DOUBLE;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turns.element.ended_s DOUBLE;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turns.element.num_draft_tokens INTEGER;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turns.element.num_accepted_tokens INTEGER;
"""
"""Columns that older stores of this version lack."""

ABSENT_ROLLOUTS = f"""
SELECT NULL::{_TURNS} AS turns, NULL::INTEGER AS observed_tokens, NULL::DOUBLE AS environment_score
WHERE false
"""
"""No rows, with the columns of `rollouts` that older files lack. A query that unites it with older
rows reads NULL there."""

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
`left_out`: whether the trainer leaves the row out. A failed conversation without a reward is not in
`group_rewards`, and its `reward` is 0.
"""
