-- A store of refrain 0.1.0, with two steps of one rollout.
CREATE TABLE meta("name" VARCHAR PRIMARY KEY, "value" VARCHAR NOT NULL);
CREATE TABLE outcomes(split VARCHAR, step INTEGER, outcome JSON NOT NULL, PRIMARY KEY(split, step));
CREATE TABLE "plans"(split VARCHAR, step INTEGER, plan JSON NOT NULL, PRIMARY KEY(split, step));
CREATE TABLE rewards(split VARCHAR, step INTEGER, prompt_key VARCHAR, sample_index INTEGER, reward DOUBLE NOT NULL, extra JSON NOT NULL, CHECK(isfinite(reward)), PRIMARY KEY(split, step, prompt_key, sample_index));
CREATE TABLE rollouts(split VARCHAR, step INTEGER, origin_step INTEGER NOT NULL, epoch INTEGER NOT NULL, prompt_key VARCHAR, sample_index INTEGER, prompt_token_ids INTEGER[] NOT NULL, response_token_ids INTEGER[] NOT NULL, inference_logprobs FLOAT[] NOT NULL, response_tokens INTEGER NOT NULL, finish_reason VARCHAR NOT NULL, engine INTEGER NOT NULL, drafter VARCHAR NOT NULL, policy_version INTEGER NOT NULL, last_policy_version INTEGER NOT NULL, version_spans STRUCT(policy_version INTEGER, num_tokens INTEGER)[] NOT NULL, num_draft_tokens INTEGER NOT NULL, num_accepted_tokens INTEGER NOT NULL, num_verifications INTEGER NOT NULL, started_s DOUBLE NOT NULL, finished_s DOUBLE NOT NULL, PRIMARY KEY(split, step, prompt_key, sample_index));
CREATE TABLE steps(step INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, reward_mean DOUBLE NOT NULL, step_s DOUBLE, report JSON NOT NULL);
INSERT INTO meta VALUES ('format', 'refrain store'), ('schema_version', '4');
INSERT INTO rollouts SELECT 'train', step, step, 0, 'a', 0, [1, 2], [7, 7, 7], [-0.5, -0.5, -0.5], 3,
  'stop', 0, 'histospec', step - 1, step - 1, [{'policy_version': step - 1, 'num_tokens': 3}],
  4, 2, 1, 1.0, 2.0 FROM unnest([1, 2]) AS steps(step);
INSERT INTO rewards SELECT 'train', step, 'a', 0, 0.5, '{}' FROM unnest([1, 2]) AS steps(step);
INSERT INTO steps SELECT step, 0, 0.5, 2.0, json_object('step', step, 'epoch', 0, 'reward_mean', 0.5,
  'metrics', json_object('response_length/mean', 3.0), 'timing_s', json_object('rollout', 1.0,
  'step', 2.0), 'undrawn', NULL) FROM unnest([1, 2]) AS steps(step);
