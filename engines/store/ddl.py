"""The tables of a run's store, as SQL.

In every table of rollouts, (split, step, prompt_key, sample_index) is the primary key. Every insert
skips rows that are already present, so a retry adds nothing.
"""

SCHEMA_VERSION = 6

_TURNS = (
    "STRUCT(num_sampled INTEGER, num_observed INTEGER, waited_s DOUBLE, score DOUBLE, "
    "num_calls INTEGER, num_failed_calls INTEGER, ended_s DOUBLE, num_draft_tokens INTEGER, "
    "num_accepted_tokens INTEGER)[]"
)
"""Type of a conversation's turns (`schemas.rollout.Turn`)."""

OPEN_TURNS = f"""
CREATE TABLE IF NOT EXISTS open_turns (      -- answered turns of unfinished conversations
    split VARCHAR NOT NULL,
    origin_step INTEGER NOT NULL,            -- whose plan drew the sample
    prompt_key VARCHAR NOT NULL,
    sample_index INTEGER NOT NULL,           -- in that step, so never negative
    number INTEGER NOT NULL,                 -- from 0; replaces earlier rows from this number on
    response_token_ids INTEGER[] NOT NULL,   -- of this turn: sampled, then observed
    inference_logprobs FLOAT[] NOT NULL,
    version_spans STRUCT(policy_version INTEGER, num_tokens INTEGER)[] NOT NULL,
    turns {_TURNS} NOT NULL,                 -- this one
    num_draft_tokens INTEGER NOT NULL,       -- of all turns so far, as the next three
    num_accepted_tokens INTEGER NOT NULL,
    num_verifications INTEGER NOT NULL,
    num_rejections INTEGER NOT NULL,
    answer VARCHAR NOT NULL                  -- schemas.environment.EnvironmentAnswer, as JSON
);
"""
"""Table that older stores of this version lack."""

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
    entropy DOUBLE,                          -- their mean, negated; NULL: none, or an older row
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
    experts BLOB,                            -- schemas.rollout.Generated; NULL: not recorded
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
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS experts BLOB;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS entropy DOUBLE;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turns.element.ended_s DOUBLE;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turns.element.num_draft_tokens INTEGER;
ALTER TABLE rollouts ADD COLUMN IF NOT EXISTS turns.element.num_accepted_tokens INTEGER;
"""
"""Columns that older stores of this version lack."""

ABSENT_ROLLOUTS = f"""
SELECT NULL::{_TURNS} AS turns, NULL::INTEGER AS observed_tokens,
    NULL::DOUBLE AS environment_score, NULL::BLOB AS experts, NULL::DOUBLE AS entropy
WHERE false
"""
"""No rows, with the columns of `rollouts` that older files lack. A query that unites it with older
rows reads NULL there."""
