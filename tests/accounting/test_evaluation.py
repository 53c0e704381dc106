"""The figures that an evaluation reports, from hand-made rewards."""

import json

import pyarrow as pa
import pytest
from rich.console import Console

from refrain.engines.accounting.metrics import evaluation_metrics, evaluation_report
from refrain.engines.reports.runs import print_evaluation
from refrain.schemas.config import TrainConfig
from refrain.schemas.evaluation import EvaluationReport
from refrain.schemas.rollout import Split
from refrain.schemas.step import RewardedBatch, RolloutBatch

CONFIG = TrainConfig.model_validate(
    {
        "name": "mine-step-3",
        "seed": 5,
        "validation_samples": 2,
        "model": {"path": "m"},
        "data": {"train": ["d/easy.parquet"], "validation": ["d/easy.parquet", "hard.jsonl"]},
    }
)
BATCH = RolloutBatch(
    split=Split.VALIDATION,
    step=3,
    policy_version=3,
    num_rollouts=6,
    num_tokens=120,
    mean_response_tokens=20.0,
    max_response_tokens=40,
    clip_ratio=0.25,
    num_draft_tokens=0,
    num_accepted_tokens=0,
    generation_s=4.0,
    sync_s=0.0,
    canary_error=None,
    shares=(),
)
REWARDED = RewardedBatch(
    split=Split.VALIDATION,
    step=3,
    num_rollouts=6,
    reward_mean=0.5,
    reward_max=1.0,
    reward_min=0.0,
    best_of_group=1.0,
    reward_s=0.1,
)


@pytest.fixture
def report() -> EvaluationReport:
    """Return a report on two prompts of `org/easy` and one of `hard`. Only the scorer of `hard`
    returns an answer."""
    plain, answered = json.dumps({}), json.dumps({"pred": "7"})
    rewards = pa.table(
        {
            "prompt_key": ["a", "a", "b", "b", "c", "c"],
            "sample_index": [0, 1, 0, 1, 0, 1],
            "reward": [1.0, 0.0, 0.0, 0.0, 1.0, 1.0],
            "extra": [plain] * 4 + [answered] * 2,
        }
    )
    sources = {"a": "org/easy", "b": "org/easy", "c": "hard"}
    return evaluation_report(CONFIG, BATCH, REWARDED, rewards, sources)


def test_figures_by_data_source(report: EvaluationReport) -> None:
    assert [(s.data_source, s.num_prompts, s.figures) for s in report.sources] == [
        ("hard", 1, {"mean@2": 1.0, "best@2": 1.0, "maj@2": 1.0}),
        ("org/easy", 2, {"mean@2": 0.25, "best@2": 0.5, "std_error@2": 0.25}),
    ]
    assert (report.tokens_per_second, report.seed, report.samples) == (30.0, 5, 2)
    assert EvaluationReport.model_validate_json(report.model_dump_json()) == report


def test_names_in_mlflow(report: EvaluationReport) -> None:
    assert evaluation_metrics(report) == {
        "evaluation/easy-hard/hard/mean_at_2": 1.0,
        "evaluation/easy-hard/hard/best_at_2": 1.0,
        "evaluation/easy-hard/hard/maj_at_2": 1.0,
        "evaluation/easy-hard/org/easy/mean_at_2": 0.25,
        "evaluation/easy-hard/org/easy/best_at_2": 0.5,
        "evaluation/easy-hard/org/easy/std_error_at_2": 0.25,
    }


def test_a_row_for_each_data_source(report: EvaluationReport) -> None:
    console = Console(width=120, record=True)
    print_evaluation(report, console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert lines[0] == ["data", "source", "prompts", "mean@2", "best@2", "maj@2"]
    assert lines[1] == ["hard", "1", "1.000", "1.000", "1.000"]
    assert lines[2] == ["org/easy", "2", "0.250±0.250", "0.500", "-"]
