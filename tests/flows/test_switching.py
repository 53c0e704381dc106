"""A real run whose engines switch to a higher TP degree within a step."""

import json
from pathlib import Path

import pytest

from refrain.benchmarks.chaos.small_run import profile_as_if_it_paid
from tests.flows.commands import Command, write_config
from tests.flows.test_train import NUM_STEPS, query

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = (
    "SELECT step, prompt_key, sample_index, response_token_ids, finish_reason FROM rollouts "
    f"WHERE split = 'train' AND step <= {NUM_STEPS // 2} ORDER BY ALL"
)
"""Query for the responses of the first epoch."""


def test_switches_change_no_token(tmp_path: Path, whole_run: Path) -> None:
    changes = {
        "pat": {"tp_degrees": [2]},
        "profile": str(profile_as_if_it_paid(tmp_path / "fast.json")),
    }
    command = Command("train", write_config(tmp_path, num_epochs=1, **changes))
    try:
        command.finish()
    finally:
        command.close()
    run_dir = tmp_path / "runs" / "demo"
    reports = [json.loads(report) for (report,) in query(run_dir, "SELECT report FROM steps")]
    assert len(reports) == NUM_STEPS // 2
    # On a busy machine, a step may end before its switch.
    assert sum(report["metrics"]["rollout/num_switches"] for report in reports) >= 1
    assert query(run_dir, TOKENS) == query(whole_run, TOKENS)
