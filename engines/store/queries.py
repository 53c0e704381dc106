"""The longer SQL of the store. Parameters are named ($name)."""

FINISHED = """
SELECT prompt_key, sample_index, policy_version, last_policy_version, origin_step
FROM rollouts WHERE split = $split AND step = $step
"""

SCORING_ROWS = """
SELECT prompt_key, sample_index, response_token_ids
FROM rollouts AS r
WHERE split = $split AND step = $step AND NOT EXISTS (
    FROM rewards AS w
    WHERE w.split = r.split AND w.step = r.step
      AND w.prompt_key = r.prompt_key AND w.sample_index = r.sample_index
)
ORDER BY prompt_key, sample_index
"""

TIMED_ROLLOUTS = """
SELECT prompt_key, sample_index, engine, started_s, finished_s, len(prompt_token_ids) AS
    prompt_tokens, response_tokens, version_spans[-1].num_tokens AS step_tokens, finish_reason,
    drafter, num_draft_tokens, num_accepted_tokens, reward
FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
WHERE split = $split AND step = $step
ORDER BY started_s, finished_s, prompt_key, sample_index
"""

ENGINE_TIMES = """
SELECT split, step, prompt_key, sample_index, engine, started_s, finished_s, response_tokens,
    finish_reason, drafter, num_draft_tokens, num_accepted_tokens, reward
FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
ORDER BY started_s, finished_s
"""

ORPHANED_REWARDS = """
SELECT prompt_key, sample_index FROM rows
ANTI JOIN (
    SELECT prompt_key, sample_index FROM rollouts WHERE split = $split AND step = $step
) USING (prompt_key, sample_index)
LIMIT 1
"""

TRAINING_ROWS = """
WITH trained AS (
    FROM rollouts WHERE split = 'train' AND step = $step
), groups AS (
    SELECT origin_step, prompt_key,
        list(reward ORDER BY sample_index) AS group_rewards,
        list(response_tokens ORDER BY sample_index) AS group_lengths
    FROM rollouts
    JOIN rewards USING (split, step, prompt_key, sample_index)
    SEMI JOIN trained USING (origin_step, prompt_key)
    WHERE split = 'train' AND step BETWEEN (SELECT min(origin_step) FROM trained) AND $step
    GROUP BY origin_step, prompt_key
)
SELECT prompt_key, sample_index, prompt_token_ids, response_token_ids, reward, inference_logprobs,
    origin_step, group_rewards, group_lengths, version_spans
FROM trained
LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
LEFT JOIN groups USING (origin_step, prompt_key)
LEFT JOIN (
    SELECT unnest($keys) AS prompt_key, unnest(range(len($keys))) AS position
) USING (prompt_key)
ORDER BY position, prompt_key, origin_step, sample_index
"""
"""A group's samples are trained in the step that planned them or a later one. Those of steps after
$step are not known when it is trained, and are not there when it is trained again."""

DRAFTED = """
SELECT drafter, policy_version, sum(num_draft_tokens), sum(num_accepted_tokens)
FROM rollouts
WHERE split = 'train' AND step < $before_step AND num_draft_tokens > 0
GROUP BY drafter, policy_version
ORDER BY drafter, policy_version
"""

LENGTH_HISTORY = """
WITH steps AS (
    SELECT prompt_key, origin_step, median(response_tokens) AS median_tokens,
        max(response_tokens) AS longest_tokens,
        row_number() OVER (PARTITION BY prompt_key ORDER BY origin_step DESC) AS age
    FROM rollouts
    WHERE split = 'train'
      AND ($before_step IS NULL OR origin_step < $before_step)
      AND ($keys IS NULL OR prompt_key IN (SELECT unnest($keys)))
    GROUP BY prompt_key, origin_step
)
SELECT prompt_key, last.median_tokens, last.longest_tokens, previous.median_tokens
FROM steps AS last
LEFT JOIN (FROM steps WHERE age = 2) AS previous USING (prompt_key)
WHERE last.age = 1
"""

HISTORY = """
SELECT count(DISTINCT prompt_key), count(*), coalesce(sum(response_tokens), 0)
FROM rollouts
WHERE split = 'train' AND ($before_step IS NULL OR step < $before_step)
"""

LAST_STEPS = """
SELECT prompt_key, max(origin_step)
FROM rollouts SEMI JOIN rewards USING (split, step, prompt_key, sample_index)
WHERE split = $split AND origin_step < $before_step AND prompt_key IN (SELECT unnest($keys))
GROUP BY prompt_key
"""

INDEX_ROWS = """
SELECT prompt_key, origin_step AS step, prompt_token_ids, response_token_ids, reward
FROM rollouts
JOIN rewards USING (split, step, prompt_key, sample_index)
JOIN (
    SELECT unnest($keys) AS prompt_key, unnest($steps) AS origin_step
) USING (prompt_key, origin_step)
WHERE split = $split
ORDER BY prompt_key, sample_index
"""

FORGET_ROLLOUTS = """
DELETE FROM rollouts
WHERE step > $step AND (
    split = 'train'
    AND policy_version >= origin_step - 1 - $max_staleness
    AND last_policy_version <= $policy_version
    AND (origin_step = step OR origin_step <= $step)
) IS NOT TRUE
"""
"""Not TRUE rather than false: without a policy version the condition is NULL and nothing stays. A
deferred rollout goes with the plan that drew it."""

SHOWN_ROLLOUTS = """
SELECT prompt_key, sample_index, prompt_token_ids, response_token_ids, reward, response_tokens,
    finish_reason
FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
WHERE split = $split AND step = $step
ORDER BY prompt_key, sample_index
LIMIT $num_rows
"""

REWARD_BY_EPOCH = """
SELECT avg(reward)
FROM rewards JOIN rollouts USING (split, step, prompt_key, sample_index)
WHERE split = 'train' AND step IN (SELECT step FROM steps)
GROUP BY epoch ORDER BY epoch
"""

DRAFTING_BY_EPOCH = """
SELECT sum(num_accepted_tokens) / nullif(sum(num_draft_tokens), 0),
    sum(num_accepted_tokens) / sum(response_tokens)
FROM rollouts WHERE split = 'train' AND step IN (SELECT step FROM steps)
GROUP BY epoch ORDER BY epoch
"""

REWARD_BY_VALIDATION = """
SELECT avg(reward) FROM rewards WHERE split = 'validation' GROUP BY step ORDER BY step
"""

TRAINED = """
SELECT count(*), coalesce(sum(response_tokens), 0)
FROM rollouts WHERE split = 'train' AND step IN (SELECT step FROM steps)
"""
