"""Each metric that a run logs has a description, and each description has a metric.
`tests/learn/test_algorithms_page.py` checks the trainer's metrics."""

import re
from collections.abc import Iterable
from dataclasses import asdict

import pyarrow as pa

from refrain.engines.accounting.metric_names import SECTIONS
from refrain.engines.accounting.metrics import (
    evaluation_metrics,
    step_report,
    summarise_rewards,
    summarise_rollouts,
    summary_metrics,
    timing_metrics,
    validation_metrics,
)
from refrain.engines.accounting.savings import saving_metrics
from refrain.engines.accounting.sources import source_metrics
from refrain.engines.reward.metrics import sample_figures
from refrain.engines.store.tables import TURNS
from refrain.schemas.counts import DraftingCounts, StreamCounts
from refrain.schemas.evaluation import EvaluationReport, SourceFigures
from refrain.schemas.rollout import Turn
from refrain.schemas.step import TrainReport
from refrain.schemas.timeline import Saving, Savings, Technique
from refrain.schemas.weights import PolicyWeights
from tests.accounting.test_metrics import (
    HISTORY,
    PLAN,
    ROWS,
    SUMMARY,
    TIMELINE,
    outcome,
    rewards,
    share,
)

NAMES = {name for metrics in SECTIONS.values() for metric in metrics for name in metric.each}
OF_TRAINER = ("actor/", "mismatch/", "staleness/", "critic/rewards/", "critic/advantages/")
OF_TRAINER += ("critic/zero_", "routing/")


def described_as(logged: Iterable[str]) -> dict[str, str | None]:
    """Return the declared name that describes each logged metric, or None."""
    patterns = {name: _pattern(name) for name in sorted(NAMES, key=_num_open)}
    return {
        one: next((name for name, pattern in patterns.items() if pattern.fullmatch(one)), None)
        for one in logged
    }


def _num_open(name: str) -> tuple[int, int]:
    """Sort key of names: plain names before names with braces, and long before short."""
    return name.count("{"), -len(name)


def _pattern(name: str) -> re.Pattern[str]:
    plain = re.split(r"\{\w+\}", name)
    return re.compile(".+".join(map(re.escape, plain)))


def of_a_step() -> dict[str, float]:
    rows = ROWS.drop_columns(["num_draft_tokens", "num_verifications", "turns"])
    turns = [
        asdict(Turn(3, 2, num_draft_tokens=8, num_accepted_tokens=4)),
        asdict(Turn(1, num_draft_tokens=8, num_accepted_tokens=4)),
    ]
    rows = rows.append_column("turns", pa.array([turns] * 4, TURNS))
    for name in ("num_draft_tokens", "num_verifications"):
        rows = rows.append_column(name, pa.array([8, 0, 0, 0]))
    drafting = DraftingCounts(30, 15, 0.25, num_shared_draft_tokens=4)
    shares = share(0, 4.0).model_copy(update={"drafting": drafting})
    batch = summarise_rollouts(PLAN, rows, outcome(shares), TIMELINE, {"small": StreamCounts(8)})
    rewarded = summarise_rewards(batch, rewards(('{"format": 1}',) * 4), 0.1)
    trained = TrainReport(
        step=3,
        policy_version=3,
        num_tokens=100,
        metrics={"timing_s/publish": 0.1},
        train_s=2.0,
        weights=PolicyWeights(3, b"", ()),
    )
    known = {"num_prompt_tokens": 40, "num_devices": 2}
    report = step_report(HISTORY, PLAN, batch, rewarded, trained, None, 107.0, **known)
    saved = saving_metrics(Savings(10.0, 8.0, "x", (Saving(Technique.DRAFTING, 5.0, 2.0),)))
    of_validation = validation_metrics(rewarded, figures_of_samples())
    of_sources = source_metrics(
        pa.table({"prompt_key": ["a"], "reward": [1.0], "response_tokens": [9]}), {"a": "math"}, 1.0
    )
    own = report.metrics | of_sources | {"curriculum/skipped_share": 0.0}
    return own | timing_metrics(report.timing_s) | saved | of_validation


def figures_of_samples() -> tuple[SourceFigures, ...]:
    table = pa.table(
        {
            "prompt_key": ["a"] * 4 + ["b"] * 4,
            "reward": [1.0, 0.0] * 4,
            "extra": ['{"pred": "7"}'] * 8,
        }
    )
    return sample_figures(table, {"a": "org/easy", "b": "org/easy"})


def of_a_run() -> dict[str, float]:
    source = SourceFigures(data_source="easy", num_prompts=1, figures={"mean@2": 0.5})
    report = EvaluationReport.model_construct(data=(), sources=(source,))
    return summary_metrics(SUMMARY) | evaluation_metrics(report)


def test_every_metric_is_described_and_nothing_else():
    described = described_as(of_a_step() | of_a_run() | {"system/load": 1.0})
    assert [name for name, found in described.items() if found is None] == []
    of_trainer = (*OF_TRAINER, "draft_head/")
    assert {name for name in NAMES if not name.startswith(of_trainer)} == {*described.values()}


def test_a_plain_name_is_meant_rather_than_one_with_braces():
    names = ["critic/score/mean", "critic/format/mean", "saved_s/racing_uncertainty", "score/mean"]
    assert [*described_as(names).values()] == [
        "critic/score/mean",
        "critic/{part}/mean",
        "saved_s/{technique}_uncertainty",
        None,
    ]


def test_no_name_is_described_twice():
    each = [name for metrics in SECTIONS.values() for metric in metrics for name in metric.each]
    assert len(each) == len(NAMES)
