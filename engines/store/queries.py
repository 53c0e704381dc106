"""The store's longer SQL queries. Parameters are named ($name).

A failed conversation (`schemas.rollout.FinishReason.FAILED`) may have no reward.

Rows that an older refrain wrote have NULL in `turns` and `observed_tokens`.
"""

from refrain.schemas.rollout import OVERLONG, FinishReason

_OVERLONG = tuple(map(str, OVERLONG))
_FAILED = f"finish_reason = '{FinishReason.FAILED}'"

_WAITS = """[
    [turn.ended_s, turn.ended_s + turn.waited_s] for turn in coalesce(turns, [])
    if turn.ended_s IS NOT NULL AND turn.waited_s > 0
] AS waits"""
"""Unix times from and to which a conversation waited for its environment."""

_WAIT_S = "coalesce(list_sum([turn.waited_s for turn in turns]), 0.0)"
"""Seconds in which a response waited for its environment."""

FINISHED = """
SELECT prompt_key, sample_index, policy_version, last_policy_version, origin_step
FROM rollouts WHERE split = $split AND step = $step
"""

SCORING_ROWS = f"""
SELECT prompt_key, sample_index, response_token_ids, coalesce(turns, []) AS turns,
    environment_score, finish_reason
FROM rollouts AS r
SEMI JOIN (
    SELECT prompt_key FROM rollouts WHERE split = $split AND step = $step
    GROUP BY prompt_key HAVING count(*) >= $num_finished
) USING (prompt_key)
WHERE split = $split AND step = $step AND NOT EXISTS (
    FROM rewards AS w
    WHERE w.split = r.split AND w.step = r.step
      AND w.prompt_key = r.prompt_key AND w.sample_index = r.sample_index
) AND NOT ($leave_out AND {_FAILED})
ORDER BY prompt_key, sample_index
"""

TIMED_ROLLOUTS = f"""
SELECT prompt_key, sample_index, engine, started_s, finished_s, len(prompt_token_ids) AS
    prompt_tokens, response_tokens, version_spans[-1].num_tokens AS step_tokens, finish_reason,
    drafter, num_draft_tokens, num_accepted_tokens, reward, {_WAITS}
FROM rollouts
JOIN prompts USING (prompt_key)
LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
WHERE split = $split AND step = $step
ORDER BY started_s, finished_s, prompt_key, sample_index
"""

ENGINE_TIMES = f"""
SELECT split, step, prompt_key, sample_index, engine, started_s, finished_s, response_tokens,
    finish_reason, drafter, num_draft_tokens, num_accepted_tokens, reward, {_WAITS}
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

TRAINING_ROWS = f"""
WITH trained AS (
    FROM rollouts WHERE split = 'train' AND step = $step
), groups AS (
    SELECT origin_step, prompt_key,
        list(reward ORDER BY sample_index) FILTER (reward IS NOT NULL) AS group_rewards,
        list(response_tokens ORDER BY sample_index) FILTER (reward IS NOT NULL) AS group_lengths,
        count(reward) < 2 AND bool_or(reward IS NULL AND {_FAILED}) AS too_small
    FROM rollouts
    LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
    SEMI JOIN trained USING (origin_step, prompt_key)
    WHERE split = 'train' AND step BETWEEN (SELECT min(origin_step) FROM trained) AND $step
    GROUP BY origin_step, prompt_key
)
SELECT prompt_key, sample_index, prompt_token_ids, response_token_ids,
    coalesce(reward, if({_FAILED}, 0.0, NULL)) AS reward, inference_logprobs, origin_step,
    coalesce(group_rewards, []) AS group_rewards, coalesce(group_lengths, []) AS group_lengths,
    version_spans, finish_reason IN {_OVERLONG} AS truncated, coalesce(turns, []) AS turns,
    too_small OR (rewards.reward IS NULL AND {_FAILED}) AS left_out,
    coalesce(experts, ''::BLOB) AS experts
FROM trained
JOIN prompts USING (prompt_key)
LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
LEFT JOIN groups USING (origin_step, prompt_key)
LEFT JOIN (
    SELECT unnest($keys) AS prompt_key, unnest(range(len($keys))) AS position
) USING (prompt_key)
ORDER BY position, prompt_key, origin_step, sample_index
"""
"""A group's samples are trained in the step that planned them or in a later one. When $step is
trained, or trained again after a resume, samples of later steps do not exist yet.

A failed conversation without a reward is left out (`environment.on_error`), and so is the only
other member of its group."""

RECENT_VERSIONS = 16
"""Number of last policy versions for which the store knows a drafter's acceptance."""

DRAFTED = f"""
SELECT drafter, policy_version, sum(accepted)::BIGINT, sum(rejections)::BIGINT
FROM (
    SELECT drafter, policy_version, num_draft_tokens AS drafted, num_accepted_tokens AS accepted,
        num_rejections AS rejections
    FROM rollouts
    WHERE split = 'train' AND step < $before_step AND num_draft_tokens > 0
    UNION ALL BY NAME
    FROM archived_drafts WHERE $recent
)
WHERE rejections IS NOT NULL
GROUP BY drafter, policy_version
QUALIFY row_number() OVER (PARTITION BY drafter ORDER BY policy_version DESC) <= {RECENT_VERSIONS}
ORDER BY drafter, policy_version
"""

LENGTH_HISTORY = f"""
WITH lengths AS (
    SELECT prompt_key, origin_step, response_tokens,
        greatest(1, response_tokens - num_accepted_tokens) AS num_passes, {_WAIT_S} AS wait_s,
        observed_tokens
    FROM rollouts WHERE split = 'train'
    UNION ALL
    SELECT prompt_key, origin_step, unnest(lengths), unnest(passes), unnest(waits_s),
        unnest(observed)
    FROM archived_groups
    WHERE split = 'train' AND $recent
), steps AS (
    SELECT prompt_key, origin_step, median(response_tokens) AS median_tokens,
        max(response_tokens) AS longest_tokens,
        greatest(1.0, sum(response_tokens) / sum(coalesce(num_passes, response_tokens)))
            AS tokens_per_pass,
        coalesce(avg(wait_s), 0.0) AS mean_wait_s,
        coalesce(sum(observed_tokens) / nullif(sum(response_tokens), 0), 0.0) AS observed_per_token,
        row_number() OVER (PARTITION BY prompt_key ORDER BY origin_step DESC) AS age
    FROM lengths
    WHERE ($before_step IS NULL OR origin_step < $before_step)
      AND ($keys IS NULL OR prompt_key IN (SELECT unnest($keys)))
    GROUP BY prompt_key, origin_step
)
SELECT prompt_key, last.median_tokens, last.longest_tokens, previous.median_tokens,
    last.tokens_per_pass, last.mean_wait_s, last.observed_per_token
FROM steps AS last
LEFT JOIN (FROM steps WHERE age = 2) AS previous USING (prompt_key)
WHERE last.age = 1
ORDER BY prompt_key
"""
"""The order of prompts is fixed, because the order of a sum changes its last bit."""

HISTORY = """
WITH counted AS (
    SELECT prompt_key, response_tokens FROM rollouts
    WHERE split = 'train' AND ($before_step IS NULL OR step < $before_step)
), archived AS (
    FROM archives WHERE $recent
)
SELECT (
        SELECT count(DISTINCT prompt_key) FROM (
            SELECT prompt_key FROM counted UNION ALL
            SELECT prompt_key FROM archived_groups WHERE split = 'train' AND $recent
        )
    ),
    count(*) + (SELECT coalesce(sum(num_rollouts), 0) FROM archived)::BIGINT,
    coalesce(sum(response_tokens), 0)::BIGINT
        + (SELECT coalesce(sum(num_tokens), 0) FROM archived)::BIGINT
FROM counted
"""

PASS_RATES = """
SELECT prompt_key, avg((reward >= $pass_score)::INTEGER), origin_step
FROM (
    SELECT prompt_key, reward, step - (sample_index < 0)::INTEGER AS origin_step
    FROM rewards WHERE split = 'train' AND step < $before_step
)
WHERE origin_step >= $since
GROUP BY prompt_key, origin_step
QUALIFY row_number() OVER (PARTITION BY prompt_key ORDER BY origin_step DESC) = 1
"""
"""A sample with a negative index was deferred by the step before, which drew it."""

LAST_STEPS = """
SELECT prompt_key, max(origin_step)
FROM (
    SELECT prompt_key, origin_step
    FROM rollouts SEMI JOIN rewards USING (split, step, prompt_key, sample_index)
    WHERE split = $split
    UNION ALL
    SELECT prompt_key, origin_step FROM archived_groups
    WHERE split = $split AND num_scored > 0 AND $recent
)
WHERE origin_step < $before_step AND prompt_key IN (SELECT unnest($keys))
GROUP BY prompt_key
"""

INDEX_ROWS = """
SELECT prompt_key, origin_step AS step, prompt_token_ids, response_token_ids, reward,
    coalesce(turns, []) AS turns
FROM rollouts
JOIN prompts USING (prompt_key)
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
"""The condition says which rollouts stay. It is IS NOT TRUE because without a policy version the
condition is NULL, and then no rollout stays. A deferred rollout goes with the plan that drew it."""

FORGET_EXPERTS = "UPDATE rollouts SET experts = NULL WHERE step <= ? AND experts IS NOT NULL"

_OF_SAMPLE = """t.split = r.split AND t.origin_step = r.origin_step AND t.prompt_key = r.prompt_key
    AND t.sample_index = greatest(r.sample_index, -1 - r.sample_index)
"""
"""Whether an open turn t belongs to the sample of a rollout r, which may have been deferred."""

CLOSE_TURNS = f"DELETE FROM open_turns AS t USING rollouts AS r WHERE {_OF_SAMPLE}"

OPEN_TURNS = f"""
FROM open_turns AS t
WHERE coalesce(split = $split AND origin_step = $step, true)
  AND NOT EXISTS (FROM rollouts AS r WHERE {_OF_SAMPLE})
ORDER BY rowid
"""
"""Some turns may have come after their rollout. The next rollout of any conversation removes them.
"""

FORGET_TURNS = """
DELETE FROM open_turns
WHERE (
    list_max([span.policy_version for span in version_spans]) <= $policy_version
    AND (
        origin_step <= $step
        OR split = 'train' AND origin_step - 1 - $max_staleness
            <= list_min([span.policy_version for span in version_spans])
    )
) IS NOT TRUE
"""
"""The same condition as for rollouts. A conversation whose first turn goes is drawn anew."""

SHOWN_ROLLOUTS = """
SELECT prompt_key, sample_index, prompt_token_ids, response_token_ids, reward, response_tokens,
    finish_reason
FROM rollouts
JOIN prompts USING (prompt_key)
LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
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

REWARDS_BY_VALIDATION = """
SELECT list(reward) FROM rewards WHERE split = 'validation' GROUP BY step ORDER BY step
"""

TRAINED = """
SELECT count(*), coalesce(sum(response_tokens), 0)
FROM rollouts WHERE split = 'train' AND step IN (SELECT step FROM steps)
"""

MOVABLE = """
SELECT min(step), coalesce(sum(response_tokens + observed_tokens), 0) FROM rollouts WHERE step <= ?
"""

NEXT_ARCHIVE = "SELECT coalesce(max(name)::INTEGER, 0) + 1 FROM archives"

ARCHIVES = "SELECT name FROM archives WHERE last_step >= ? AND first_step <= ? ORDER BY name"

LIST_ARCHIVE = """
INSERT INTO archives BY NAME
SELECT $name AS name, coalesce(min(step), $last_step) AS first_step, $last_step AS last_step,
    count(*) FILTER (split = 'train') AS num_rollouts,
    coalesce(sum(response_tokens) FILTER (split = 'train'), 0) AS num_tokens
FROM rollouts WHERE step <= $last_step
"""

SUMS = {
    "archived_groups": f"""
WITH new AS (
    {{rows}}
    SELECT split, prompt_key, origin_step, response_tokens AS length,
        greatest(1, response_tokens - num_accepted_tokens) AS num_passes,
        {_WAIT_S} AS wait_s, observed_tokens, reward IS NOT NULL AS scored
    FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)
)
SELECT split, prompt_key, origin_step, flatten(list(lengths)) AS lengths,
    flatten(list(passes)) AS passes, flatten(list(waits_s)) AS waits_s,
    flatten(list(observed)) AS observed, sum(num_scored)::INTEGER AS num_scored
FROM (
    FROM archived_groups UNION ALL BY NAME
    SELECT split, prompt_key, origin_step, list(length) AS lengths, list(num_passes) AS passes,
        list(wait_s) AS waits_s, list(observed_tokens) AS observed, count_if(scored) AS num_scored
    FROM new GROUP BY split, prompt_key, origin_step
)
GROUP BY split, prompt_key, origin_step
QUALIFY row_number() OVER (PARTITION BY split, prompt_key ORDER BY origin_step DESC) <= 2
""",
    "archived_drafts": f"""
WITH new AS (
    {{rows}}
    SELECT drafter, policy_version, num_draft_tokens AS drafted, num_accepted_tokens AS accepted,
        num_rejections AS rejections
    FROM rollouts WHERE split = 'train' AND num_draft_tokens > 0
)
SELECT drafter, policy_version, sum(drafted) AS drafted, sum(accepted) AS accepted,
    sum(rejections) AS rejections
FROM (FROM archived_drafts UNION ALL BY NAME FROM new)
GROUP BY drafter, policy_version
QUALIFY row_number() OVER (PARTITION BY drafter ORDER BY policy_version DESC) <= {RECENT_VERSIONS}
""",
}
"""Queries that add leaving rollouts to the sums over archived rollouts, by table of sums. A step
needs only these sums. `rows`: the CTEs of the leaving rows."""

LEARNT = "SELECT engine, arg_max(state, step) FROM learnt GROUP BY engine"
