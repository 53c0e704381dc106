"""Metrics of each stage of a step, computed from hand-made rows."""

from collections.abc import Sequence

import pyarrow as pa
import pytest

from refrain.engines.accounting.metrics import (
    blind_engines,
    drafting_metrics,
    reward_metrics,
    rollout_metrics,
    step_report,
    summarise_rewards,
    summarise_rollouts,
    summary_metrics,
    timing_metrics,
)
from refrain.engines.accounting.names import tracked_name
from refrain.engines.rollout.stage import Outcome
from refrain.engines.store.tables import TURNS
from refrain.schemas.counts import DraftingCounts, LibraryCounts, MoveCounts, SwitchCounts
from refrain.schemas.rollout import Split
from refrain.schemas.step import (
    EngineShare,
    HistoryReport,
    PromptGroup,
    RolloutBatch,
    RunSummary,
    StepPlan,
    TrainReport,
)
from refrain.schemas.timeline import Activity, Span, Timeline
from refrain.schemas.weights import PolicyWeights

PLAN = StepPlan(
    split=Split.TRAIN,
    step=3,
    epoch=1,
    policy_version=2,
    created_s=100.0,
    group_size=2,
    groups=(),
)
ROWS = pa.table(
    {
        "response_tokens": [10, 20, 30, 40],
        "finish_reason": ["stop", "stop", "stop", "length"],
        "turns": pa.array([[]] * 4, TURNS),
        "num_draft_tokens": [0, 0, 0, 0],
        "num_accepted_tokens": [0, 0, 0, 0],
        "num_verifications": [0, 0, 0, 0],
    }
)
HISTORY = HistoryReport(
    num_prompts=4,
    num_rollouts=8,
    num_tokens=99,
    num_indexed=3,
    indexes=LibraryCounts(num_damaged=1),
    wait_s=0.25,
)


TIMELINE = Timeline(
    start_s=6.0,
    end_s=14.0,
    engines=(0, 1),
    spans=(
        Span(0, Activity.ROLLOUT, "train/3", 9.0, 14.0),
        Span(1, Activity.ROLLOUT, "train/3", 10.0, 12.0),
    ),
)


MOVES = MoveCounts(
    num_raced=3, num_raced_with_kv=1, num_races_won=2, wasted_tokens=70, num_diverged=1
)


def outcome(*shares: EngineShare, canary_error: float | None = 1e-6) -> Outcome:
    switches = SwitchCounts((0.5,), (2e9, 3e9))
    return Outcome(shares, 10.0, 14.0, 0.5, canary_error, (), (), MOVES, switches)


def share(engine: int, busy_s: float) -> EngineShare:
    return EngineShare(engine=engine, num_rollouts=2, num_tokens=50, busy_s=busy_s)


@pytest.fixture
def batch() -> RolloutBatch:
    return summarise_rollouts(PLAN, ROWS, outcome(share(0, 4.0), share(1, 2.0)), TIMELINE)


def test_rollouts_are_summarised(batch):
    assert (batch.num_rollouts, batch.num_tokens) == (4, 100)
    assert (batch.mean_response_tokens, batch.max_response_tokens) == (25.0, 40)
    assert batch.clip_ratio == 0.25
    moves = batch.moves
    assert (moves.num_raced, moves.num_races_won, moves.wasted_tokens) == (3, 2, 70)
    assert batch.moves.num_diverged == 1
    assert batch.generation_s == 4.0
    assert batch.idle_share == pytest.approx(0.25)
    # The window is 6 to 14 s. Engine 0 began at 9 s, engine 1 at 10 s.
    assert batch.bubble_share == pytest.approx((3.0 + 6.0) / 16.0)


def rewards(extras: Sequence[str] = ("{}",) * 4) -> pa.Table:
    values = {"prompt_key": ["a", "a", "b", "b"], "reward": [1.0, 0.0, 0.0, 0.5]}
    return pa.table({**values, "extra": list(extras)})


def test_parts_of_rewards_and_what_had_no_score_are_told(batch):
    extras = (
        '{"format": 1, "pred": "4", "truthful": true, "odd @name": 2.5}',
        '{"format": 0.5, "num_retries": 3}',
        '{"pred": null, "error": "no score within 1 s"}',
        '{"format": NaN, "truthful": false}',
    )
    rewarded = summarise_rewards(batch, rewards(extras), 0.1)
    assert rewarded.parts == {"format": 0.75, "odd @name": 2.5, "truthful": 0.5}
    assert (rewarded.num_retried, rewarded.num_unscored) == (1, 1)
    metrics = reward_metrics(rewarded)
    assert metrics["critic/format/mean"] == 0.75
    assert metrics[tracked_name("critic/odd @name/mean")] == 2.5
    assert (metrics["critic/num_retried"], metrics["critic/num_unscored"]) == (1.0, 1.0)


def test_rewards_are_summarised(batch):
    rewarded = summarise_rewards(batch, rewards(), 0.1)
    assert rewarded.reward_mean == 0.375
    assert rewarded.best_of_group == 0.75
    assert (rewarded.reward_min, rewarded.reward_max) == (0.0, 1.0)
    assert rewarded.reward_std == pytest.approx((0.6875 / 4) ** 0.5)


def test_conversations_without_a_reward_are_counted(batch):
    """They are in no mean. Even a step in which all failed has figures."""
    reasons = pa.array(["failed", "stop", "failed", "length"])
    at = ROWS.column_names.index("finish_reason")
    failed = ROWS.set_column(at, "finish_reason", reasons)
    some = summarise_rollouts(PLAN, failed, outcome(share(0, 4.0)), TIMELINE)
    assert rollout_metrics(some)["rollout/num_failed"] == some.num_failed == 2
    assert rollout_metrics(batch)["rollout/num_failed"] == 0
    known = summarise_rewards(some, rewards().slice(2), 0.1)
    assert (known.num_rollouts, known.reward_mean, known.reward_min) == (2, 0.25, 0.0)
    none = summarise_rewards(some, rewards().slice(4), 0.1)
    assert (none.num_rollouts, none.reward_mean, none.best_of_group) == (0, 0.0, 0.0)


def test_a_steps_report_has_veRLs_names(batch):
    rewarded = summarise_rewards(batch, rewards(), 0.1)
    trained = TrainReport(
        step=3,
        policy_version=3,
        num_tokens=100,
        metrics={"actor/lr": 1e-6},
        train_s=2.0,
        weights=PolicyWeights(3, b"", ()),
    )
    known = {"num_prompt_tokens": 40, "num_devices": 2}
    report = step_report(HISTORY, PLAN, batch, rewarded, trained, None, 107.0, **known)
    assert report.timing_s["step"] == 7.0
    after = step_report(
        HISTORY,
        PLAN,
        batch,
        rewarded,
        trained,
        report.model_copy(update={"reported_s": 105.0}),
        107.0,
        **known,
    )
    assert after.timing_s["step"] == 2.0, "a step must begin after the last report"
    assert report.metrics["rollout/tokens_per_s"] == 25.0, "100 tokens in 4 s"
    assert report.metrics["perf/total_num_tokens"] == 140
    assert report.metrics["perf/throughput"] == 140 / (7.0 * 2), "per second of the step and device"
    timings = timing_metrics(report.timing_s)
    assert (timings["timing_s/gen"], timings["timing_s/step"]) == (4.0, 7.0)
    assert "timing_s/rollout" not in timings
    assert report.metrics["rollout/busy_s"] == 6.0
    assert report.metrics["critic/score/mean"] == 0.375
    assert report.metrics["actor/lr"] == 1e-6
    assert "rollout/spec_accept_rate" not in report.metrics
    assert "rollout/spec_gated_share" not in report.metrics
    assert report.metrics["history/num_indexed"] == 3
    assert report.metrics["history/num_damaged"] == 1
    assert report.timing_s["history"] == 0.25


def test_drafting_in_numbers():
    """60 of 100 tokens came from drafts: 80 tokens were drafted in 20 verifications."""
    rows = ROWS.drop_columns(["num_draft_tokens", "num_accepted_tokens", "num_verifications"])
    drafts = {
        "num_draft_tokens": [80, 0, 0, 0],
        "num_accepted_tokens": [50, 10, 0, 0],
        "num_verifications": [15, 5, 0, 0],
    }
    for name, values in drafts.items():
        rows = rows.append_column(name, [values])
    shares = [
        share(0, 4.0).model_copy(
            update={
                "drafting": DraftingCounts(
                    30, 15, 0.25, num_shared_draft_tokens=40, num_shared_accepted_tokens=30
                )
            }
        ),
        share(1, 1.0).model_copy(update={"drafting": DraftingCounts(10, 5, 0.25)}),
    ]
    metrics = drafting_metrics(summarise_rollouts(PLAN, rows, outcome(*shares), TIMELINE))
    assert metrics == pytest.approx(
        {
            "rollout/spec_accept_rate": 0.75,
            "rollout/spec_accept_length": 4.0,
            "rollout/speculation_rate": 0.6,
            "rollout/spec_gated_share": 0.5,
            "rollout/spec_draft_share": 0.1,
            "rollout/spec_shared_accept_rate": 0.75,
        }
    )


SUMMARY = RunSummary(
    steps=4,
    num_rollouts=64,
    reward_first=0.25,
    reward_last=0.5,
    acceptance_rate_by_epoch=(None, 0.5),
    speculation_rate_by_epoch=(0.0, 0.75),
    validation_first=0.1,
    validation_last=0.3,
    validation_best=0.4,
    tokens_per_second=99.0,
    wall_s=12.0,
    timing_s={"rollout": 8.0},
)


def test_a_run_is_summed_up_for_comparisons():
    found = summary_metrics(SUMMARY)
    assert found["summary/reward_last"] == 0.5
    assert found["summary/validation_best"] == 0.4
    assert found["summary/speculation_rate_last"] == 0.75
    assert found["summary/timing_s/rollout"] == 8.0
    plain = {"validation_best": None, "acceptance_rate_by_epoch": (None,)}
    missing = found.keys() - summary_metrics(SUMMARY.model_copy(update=plain)).keys()
    assert missing == {"summary/validation_best", "summary/acceptance_rate_last"}


GROUPS = tuple(PromptGroup(prompt_key=key, engine=0, expected_tokens=None) for key in "abcdefgh")


@pytest.mark.parametrize(
    ("num_indexed", "num_with", "num_without", "is_blind"),
    [
        (8, 0, 8, True),
        (8, 1, 7, False),
        (8, 0, 0, False),
        (6, 0, 8, True),
        # 2 of 8 prompts have no index. The 2 prompts of this engine may be exactly these.
        (6, 0, 4, False),
        (0, 0, 8, False),
    ],
)
def test_metrics_distinguish_unseen_indexes_from_missing_ones(
    batch, num_indexed, num_with, num_without, is_blind
):
    counts = DraftingCounts(num_with_index=num_with, num_without_index=num_without)
    shares = (share(0, 1.0), share(3, 1.0).model_copy(update={"drafting": counts}))
    history = HISTORY.model_copy(update={"num_indexed": num_indexed})
    plan = PLAN.model_copy(update={"groups": GROUPS})
    blind = blind_engines(history, plan, batch.model_copy(update={"shares": shares}))
    assert blind == [3] * is_blind
    assert blind_engines(history, PLAN, batch) == []
