"""The store keeps each row once, loses none, and gives each reader the right rows."""

import math
import statistics
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.accounting.metrics import summarise_rewards
from refrain.engines.store.reader import VIEWS
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store
from refrain.engines.store.tables import INDEXED, REWARDS, TRAINING
from refrain.schemas.rollout import (
    FinishReason,
    Generated,
    LengthHistory,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    VersionSpan,
)
from refrain.schemas.step import PromptGroup, RolloutOutcome, SampleName, StepPlan, StepReport


def make_rollout(
    step=1, prompt="a", sample=0, tokens=3, versions=None, split=Split.TRAIN, token=7, accepted=2
) -> Rollout:
    versions = versions if versions is not None else [(step - 1, tokens)]
    request = RolloutRequest(
        id=RequestId(split, step, prompt, sample),
        prompt_token_ids=(1, 2),
        sample_key=0,
        max_response_tokens=100,
    )
    generated = Generated(
        token_ids=[token] * tokens,
        inference_logprobs=[-0.5] * tokens,
        spans=tuple(VersionSpan(*span) for span in versions),
        num_draft_tokens=4,
        num_accepted_tokens=accepted,
        num_verifications=1,
        num_rejections=int(accepted < 4),
    )
    return Rollout(request, generated, FinishReason.STOP, engine=0, started_s=1.0, finished_s=2.0)


def add_rollouts(store: Store, *rollouts: Rollout, epoch=0) -> int:
    """Add rollouts, and return how many were new."""
    return store.add_rollouts(rollout_rows(rollouts), epoch)


def make_deferred(from_step=1, **options) -> Rollout:
    """Return a rollout that its step deferred to the next one."""
    rollout = make_rollout(step=from_step, **options)
    return replace(rollout, request=rollout.request.deferred())


def make_rewards(rows: list[tuple[str, int, float | None]]) -> pa.Table:
    keys, samples, rewards = zip(*rows, strict=True)
    columns = [keys, samples, rewards, ["{}"] * len(rows)]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, REWARDS, strict=True)]
    return pa.table(arrays, schema=REWARDS)


def make_plan(keys: list[str], step=1, group_size=1, split=Split.TRAIN) -> StepPlan:
    groups = tuple(PromptGroup(prompt_key=key, engine=0, expected_tokens=None) for key in keys)
    return StepPlan(
        split=split,
        step=step,
        epoch=0,
        policy_version=0,
        created_s=0.0,
        group_size=group_size,
        groups=groups,
    )


def make_report(step: int, epoch=0) -> StepReport:
    return StepReport(
        step=step,
        epoch=epoch,
        reward_mean=0.5,
        metrics={"critic/score/mean": 0.5},
        timing_s={"rollout": 2.0, "step": 3.0},
    )


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "run.duckdb") as store:
        yield store


def test_a_rollout_comes_back_as_it_went_in(store):
    add_rollouts(store, make_rollout(versions=[(4, 1), (5, 2)]), epoch=3)
    (row,) = store.rollouts(Split.TRAIN, 1).to_pylist()
    assert store.prompts() == {row["prompt_key"]: (1, 2)}
    assert row["response_token_ids"] == [7, 7, 7]
    assert row["inference_logprobs"] == [-0.5] * 3
    assert (row["policy_version"], row["last_policy_version"]) == (4, 5)
    assert row["version_spans"] == [
        {"policy_version": 4, "num_tokens": 1},
        {"policy_version": 5, "num_tokens": 2},
    ]
    assert (row["epoch"], row["response_tokens"], row["finish_reason"]) == (3, 3, "stop")


def test_the_first_delivery_stays(store):
    assert add_rollouts(store, make_rollout(token=1), make_rollout(token=3)) == 1
    assert add_rollouts(store, make_rollout(token=2), make_rollout(sample=1)) == 1
    tokens = store.rollouts(Split.TRAIN, 1)["response_token_ids"].to_pylist()
    assert tokens == [[1, 1, 1], [7, 7, 7]]


def test_the_splits_of_a_step_are_apart(store):
    add_rollouts(store, make_rollout(), make_rollout(split=Split.VALIDATION))
    assert store.rollouts(Split.VALIDATION, 1).num_rows == 1
    assert store.history_report().num_rollouts == 1


def test_an_inconsistent_rollout_is_refused(store):
    with pytest.raises(AssertionError, match="spans"):
        add_rollouts(store, make_rollout(tokens=3, versions=[(0, 2)]))
    assert store.rollouts(Split.TRAIN, 1).num_rows == 0


def test_no_rollouts_are_no_rows(store):
    assert add_rollouts(store) == 0
    assert store.rollouts(Split.TRAIN, 1).num_rows == 0
    assert store.scoring_rows(Split.TRAIN, 1).num_rows == 0


def test_finished_ids_are_of_the_policy_versions_allowed(store):
    add_rollouts(store, *[make_rollout(sample=i) for i in range(2)])
    ids = {RequestId(Split.TRAIN, 1, "a", i) for i in range(2)}
    assert store.finished_ids(Split.TRAIN, 1, [0]) == ids
    assert store.finished_ids(Split.TRAIN, 1, [0, 1]) == ids
    with pytest.raises(ValueError, match=r"versions 0 to 0, not by \[1\]"):
        store.finished_ids(Split.TRAIN, 1, [1])


def test_a_deferred_rollout_may_be_older(store):
    deferred = make_deferred(from_step=1, versions=[(0, 1), (1, 2)])
    add_rollouts(store, make_rollout(step=2), deferred)
    assert deferred.request.id in store.finished_ids(Split.TRAIN, 2, [1])
    late = make_rollout(step=2, sample=1, versions=[(0, 1), (1, 2)])
    add_rollouts(store, late)
    with pytest.raises(ValueError, match="versions 0 to 1"):
        store.finished_ids(Split.TRAIN, 2, [1])


def test_training_rows_follow_the_plan(store):
    pairs = [(key, i) for key in "abc" for i in range(2)]
    add_rollouts(store, *[make_rollout(prompt=key, sample=i) for key, i in pairs[::-1]])
    store.add_rewards(Split.TRAIN, 1, make_rewards([(key, i, i / 2) for key, i in pairs]))
    assert store.training_rows(1)["prompt_key"].to_pylist() == list("aabbcc")
    store.add_plan(make_plan(["c", "a", "b"], group_size=2))
    rows = store.training_rows(1)
    assert rows.schema.equals(TRAINING)
    assert rows["prompt_key"].to_pylist() == list("ccaabb")
    assert rows["reward"].to_pylist() == [0.0, 0.5] * 3


def test_training_rows_want_rollouts_the_plan_and_rewards(store):
    with pytest.raises(ValueError, match="no rollouts"):
        store.training_rows(1)
    add_rollouts(store, *[make_rollout(sample=i) for i in range(2)])
    store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, 1.0)]))
    with pytest.raises(ValueError, match=r"1 rollouts have no reward.*train/1/a/1"):
        store.training_rows(1)
    store.add_plan(make_plan(["a", "b"], group_size=2))
    with pytest.raises(ValueError, match="2 are missing and 0 were not planned"):
        store.training_rows(1)
    store.add_plan(make_plan(["a"], group_size=1))
    with pytest.raises(ValueError, match="0 are missing and 1 were not planned"):
        store.training_rows(1)


def test_only_unscored_rows_are_scored_and_the_first_reward_stays(store):
    add_rollouts(store, *[make_rollout(sample=i) for i in range(2)])
    assert store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, 1.0)])) == 1
    assert store.scoring_rows(Split.TRAIN, 1)["sample_index"].to_pylist() == [1]
    again = make_rewards([("a", 0, 0.0), ("a", 1, 0.25)])
    assert store.add_rewards(Split.TRAIN, 1, again) == 1
    assert store.rewards(Split.TRAIN, 1)["reward"].to_pylist() == [1.0, 0.25]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_is_a_finite_number(store, reward):
    add_rollouts(store, make_rollout())
    with pytest.raises(ValueError, match="missing or not finite"):
        store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, reward)]))
    assert store.rewards(Split.TRAIN, 1).num_rows == 0


def test_a_metric_that_is_not_finite_is_read_again(store):
    metrics = {"actor/pg_loss": math.nan, "actor/grad_norm": math.inf, "x": -math.inf}
    store.add_step(make_report(1).model_copy(update={"metrics": metrics}))
    (report,) = store.steps()
    assert math.isnan(report.metrics.pop("actor/pg_loss"))
    assert report.metrics == {"actor/grad_norm": math.inf, "x": -math.inf}
    values = {name: value for _, _, name, value in store._fetch(VIEWS["step_metrics"])}
    assert values["actor/grad_norm"] == math.inf


def test_truncate_keeps_on_policy_rollouts_of_the_next_step(store):
    outcome = RolloutOutcome(carried=(SampleName(prompt_key="a", sample_index=0),))
    for step in (1, 2, 3):
        add_rollouts(store, make_rollout(step=step))
        store.add_rewards(Split.TRAIN, step, make_rewards([("a", 0, 1.0)]))
        store.add_plan(make_plan(["a"], step=step))
        store.add_outcome(Split.TRAIN, step, outcome)
        store.add_step(make_report(step))
    mixed = make_rollout(step=2, sample=1, versions=[(0, 1), (1, 2)])
    validation = make_rollout(step=2, split=Split.VALIDATION, versions=[(1, 3)])
    add_rollouts(store, mixed, validation)
    store.truncate_after(1, policy_version=1)
    assert store.finished_ids(Split.TRAIN, 2, [1]) == {RequestId(Split.TRAIN, 2, "a", 0)}
    assert store.rollouts(Split.VALIDATION, 2).num_rows == 0
    assert store.rollouts(Split.TRAIN, 3).num_rows == 0
    assert store.rewards(Split.TRAIN, 2).num_rows == 0
    assert store.plan(Split.TRAIN, 2) is None
    assert [store.outcome(Split.TRAIN, step) for step in (1, 2)] == [outcome, RolloutOutcome()]
    assert store.training_rows(1).num_rows == 1
    assert (store.last_step(), len(store.steps())) == (1, 1)
    assert add_rollouts(store, mixed) == 1, "a removed rollout must be accepted again"
    store.truncate_after(1, policy_version=None)
    assert store.rollouts(Split.TRAIN, 2).num_rows == 0


def test_truncate_keeps_what_is_one_version_behind_where_that_is_allowed(store):
    for step, version in ((2, 0), (2, 1), (3, 1), (3, 2), (4, 1)):
        name = {"step": step, "sample": version, "versions": [(version, 3)]}
        add_rollouts(store, make_rollout(**name))
    store.truncate_after(1, policy_version=1, max_staleness=1)
    kept = [
        (step, row["sample_index"])
        for step in (2, 3, 4)
        for row in store.rollouts(Split.TRAIN, step, ["sample_index"]).to_pylist()
    ]
    assert kept == [(2, 0), (2, 1), (3, 1)]


def test_truncate_keeps_deferred_rollouts_with_the_plan_that_drew_them(store):
    of_kept = make_deferred(from_step=1, versions=[(0, 2), (1, 1)])
    of_forgotten = make_deferred(from_step=2, versions=[(1, 3)])
    add_rollouts(store, of_kept, of_forgotten)
    store.truncate_after(1, policy_version=1, max_staleness=1)
    assert store.rollouts(Split.TRAIN, 2).num_rows == 1
    assert store.rollouts(Split.TRAIN, 3).num_rows == 0


def test_a_step_trains_on_what_is_left_and_what_it_took_over(store):
    outcome = RolloutOutcome(
        deferred=(SampleName(prompt_key="a", sample_index=1),),
        carried=(SampleName(prompt_key="a", sample_index=-1),),
    )
    plan = make_plan(["a"], step=2, group_size=2)
    assert len(outcome.samples(plan)) == 2
    store.add_plan(plan)
    store.add_outcome(Split.TRAIN, 2, outcome)
    add_rollouts(store, make_rollout(step=2), make_deferred(from_step=1))
    store.add_rewards(Split.TRAIN, 2, make_rewards([("a", 0, 1.0), ("a", -1, 0.0)]))
    assert store.training_rows(2)["sample_index"].to_pylist() == [-1, 0]
    add_rollouts(store, make_rollout(step=2, sample=1))
    with pytest.raises(ValueError, match="0 are missing and 1 were not planned"):
        store.training_rows(2)


lengths = st.dictionaries(
    st.tuples(st.integers(1, 4), st.sampled_from("abc"), st.integers(0, 3)),
    st.tuples(st.integers(0, 9), st.integers(0, 9)).map(sorted),
)
"""Maps (step, prompt, sample) to the accepted tokens and all tokens of the response."""


@settings(max_examples=15, deadline=None)
@given(lengths=lengths, before=st.none() | st.integers(1, 5), keys=st.none() | st.just(["a", "c"]))
def test_length_history_against_brute_force(lengths, before, keys):
    with Store(":memory:") as store:
        rollouts = [
            make_rollout(*name, tokens=tokens, accepted=accepted)
            for name, (accepted, tokens) in lengths.items()
        ]
        add_rollouts(store, *rollouts)
        # A response that step 1 deferred counts towards the lengths of step 1.
        add_rollouts(store, make_deferred(from_step=1, prompt="a", sample=9, tokens=5, accepted=1))
        history = store.length_history(keys, before_step=before)
    lengths = lengths | {(1, "a", 9): [1, 5]}
    expected = {}
    for key in keys or "abc":
        of_key = {n: t for n, t in lengths.items() if n[1] == key and n[0] < (before or 99)}
        if of_key:
            by_step = {
                step: [t for n, t in of_key.items() if n[0] == step]
                for step in sorted({n[0] for n in of_key}, reverse=True)[:2]
            }
            medians = [statistics.median(t for _, t in of) for of in by_step.values()]
            last = next(iter(by_step.values()))
            longest = max(tokens for _, tokens in last)
            # A response takes at least one pass.
            num_passes = sum(max(1, tokens - accepted) for accepted, tokens in last)
            gained = max(1.0, sum(tokens for _, tokens in last) / num_passes)
            previous = medians[1] if len(medians) > 1 else None
            expected[key] = LengthHistory(medians[0], longest, previous, gained)
    assert history == expected


def test_pass_rates_are_of_the_last_step_that_drew_a_prompt(store):
    for step, keys in ((1, "ab"), (2, "b"), (3, "a")):
        add_rollouts(store, *(make_rollout(step, key, i) for key in keys for i in (0, 1)))
    scores = {1: (1.0, 0.4, 0.5, 0.0), 2: (0.0, 0.0), 3: (1.0, 1.0)}
    for step, keys in ((1, "aabb"), (2, "bb"), (3, "aa")):
        rows = zip(keys, (0, 1) * 2, scores[step], strict=False)
        store.add_rewards(Split.TRAIN, step, make_rewards(list(rows)))
    assert store.pass_rates(1, 2, 0.5) == {"a": (0.5, 1), "b": (0.5, 1)}
    assert store.pass_rates(1, 4, 0.5) == {"a": (1.0, 3), "b": (0.0, 2)}
    assert store.pass_rates(3, 4, 0.5) == {"a": (1.0, 3)}
    # A sample that step 3 deferred belongs to its group, wherever it is stored.
    add_rollouts(store, make_deferred(3, prompt="a", sample=2))
    store.add_rewards(Split.TRAIN, 4, make_rewards([("a", -3, 0.0)]))
    assert store.pass_rates(3, 5, 0.5) == {"a": (pytest.approx(2 / 3), 3)}
    assert store.pass_rates(4, 5, 0.5) == {}


def test_history_counts_before_a_step(store):
    add_rollouts(store, *[make_rollout(step, key) for step in (1, 2) for key in "ab"])
    report = store.history_report(before_step=2)
    assert (report.num_prompts, report.num_rollouts, report.num_tokens) == (2, 2, 6)
    assert store.history_report().num_rollouts == 4


def test_index_rows_are_of_each_prompts_last_scored_step(store):
    for step, token in ((1, 5), (2, 6), (3, 7)):
        rollouts = [make_rollout(step, key, i, token=token) for key in "ab" for i in range(2)]
        add_rollouts(store, *rollouts)
    add_rollouts(store, make_rollout(1, "c"))  # never scored
    store.add_rewards(Split.TRAIN, 1, make_rewards([(p, i, 0.5) for p in "ab" for i in range(2)]))
    store.add_rewards(Split.TRAIN, 2, make_rewards([("a", 0, 1.0), ("a", 1, 0.0)]))
    store.add_rewards(Split.TRAIN, 3, make_rewards([(p, 0, 9.0) for p in "ab"]))
    assert store.last_steps(Split.TRAIN, ["a", "b", "c", "d"], before_step=3) == {"a": 2, "b": 1}
    assert store.last_steps(Split.VALIDATION, ["a"], before_step=3) == {}
    assert store.last_steps(Split.TRAIN, ["b"], before_step=4) == {"b": 3}
    rows = store.index_rows(Split.TRAIN, {"b": 1, "a": 2})
    assert rows.schema == INDEXED
    found = [(r["prompt_key"], r["step"], r["reward"]) for r in rows.to_pylist()]
    assert found == [("a", 2, 1.0), ("a", 2, 0.0), ("b", 1, 0.5), ("b", 1, 0.5)]
    assert rows["response_token_ids"].to_pylist() == [[6] * 3] * 2 + [[5] * 3] * 2


def test_summary(store):
    with pytest.raises(ValueError, match="no finished step"):
        store.summary(wall_s=1.0)
    for step, reward in ((1, 0.0), (2, 1.0), (3, 0.5)):
        add_rollouts(store, make_rollout(step=step), epoch=step - 1)
        store.add_rewards(Split.TRAIN, step, make_rewards([("a", 0, reward)]))
    for step in (1, 2):
        store.add_step(make_report(step, epoch=step - 1))
    for step, reward in ((0, 0.25), (2, 0.75)):
        add_rollouts(store, make_rollout(step=step, split=Split.VALIDATION))
        store.add_rewards(Split.VALIDATION, step, make_rewards([("a", 0, reward)]))
    summary = store.summary(wall_s=9.0)
    assert (summary.steps, summary.num_rollouts, summary.wall_s) == (2, 2, 9.0)
    assert (summary.reward_first, summary.reward_last) == (0.0, 1.0)
    assert (summary.validation_first, summary.validation_last) == (0.25, 0.75)
    assert summary.tokens_per_second == 6 / 4.0
    assert summary.acceptance_rate_by_epoch == (0.5, 0.5)
    assert summary.speculation_rate_by_epoch == pytest.approx((2 / 3, 2 / 3))
    assert summary.timing_s == {"rollout": 4.0, "step": 6.0}


def test_a_validations_mean_has_the_digits_of_its_evaluation(store):
    """The mean is 0.1. Summing with rounding would give 0.10000000000000002."""
    samples = range(16)
    store.add_step(make_report(1, epoch=0))
    add_rollouts(store, make_rollout(step=1))
    store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, 1.0)]))
    validated = [make_rollout(2, "a", at, split=Split.VALIDATION) for at in samples]
    add_rollouts(store, *validated)
    store.add_rewards(Split.VALIDATION, 2, make_rewards([("a", at, 0.1) for at in samples]))
    batch = SimpleNamespace(split=Split.VALIDATION, step=2)
    evaluated = summarise_rewards(batch, store.rewards(Split.VALIDATION, 2), reward_s=0.0)
    assert store.summary(wall_s=1.0).validation_last == evaluated.reward_mean == 0.1


def test_reports_and_plans_are_replaced(store):
    assert store.last_step() is None
    store.add_step(make_report(1))
    store.add_step(make_report(1, epoch=2))
    assert [report.epoch for report in store.steps()] == [2]
    store.add_plan(make_plan(["a"]))
    store.add_plan(make_plan(["b"]))
    assert store.plan(Split.TRAIN, 1) == make_plan(["b"])
    assert store.outcome(Split.TRAIN, 1) == RolloutOutcome()
    left = RolloutOutcome(deferred=(SampleName(prompt_key="b", sample_index=0),))
    for outcome in (RolloutOutcome(), left):
        store.add_outcome(Split.TRAIN, 1, outcome)
    assert store.outcome(Split.TRAIN, 1) == left


def test_a_failed_write_leaves_nothing(store):
    add_rollouts(store, make_rollout())
    half = make_rewards([("a", 0, 1.0), ("b", 0, 1.0)])
    with pytest.raises(ValueError, match="no rollout train/1/b/0"):
        store.add_rewards(Split.TRAIN, 1, half)
    assert store.rewards(Split.TRAIN, 1).num_rows == 0


def test_some_rollouts_are_shown_with_their_rewards(store):
    add_rollouts(store, *[make_rollout(sample=i) for i in range(3)])
    store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, 1.0)]))
    rows = store.shown_rollouts(Split.TRAIN, 1, 2).to_pylist()
    assert [row["reward"] for row in rows] == [1.0, None]


def test_rollouts_have_times_and_the_tokens_of_their_step(store):
    late = replace(make_rollout(sample=1), started_s=1.5)
    deferred = make_deferred(from_step=0, prompt="b", tokens=5, versions=[(0, 2), (1, 3)])
    add_rollouts(store, late, make_rollout(), deferred)
    store.add_rewards(Split.TRAIN, 1, make_rewards([("a", 0, 1.0)]))
    rows = store.timed_rollouts(Split.TRAIN, 1).to_pylist()
    told = [
        (row["prompt_key"], row["sample_index"], row["started_s"], row["reward"]) for row in rows
    ]
    assert told == [("a", 0, 1.0, 1.0), ("b", -1, 1.0, None), ("a", 1, 1.5, None)]
    lengths = [(row["response_tokens"], row["step_tokens"], row["prompt_tokens"]) for row in rows]
    assert lengths == [(3, 3, 2), (5, 3, 2), (3, 3, 2)]
