"""No schedule changes a token: a run with moved and stale requests against one in turn."""

import json
from pathlib import Path
from typing import Any

import pytest

from refrain.engines.store.archive import query_all
from refrain.tasks.run.run_dir import STORE_FILE
from tests.flows.commands import Command, write_config
from tests.flows.test_train import slowed

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = "SELECT step, prompt_key, sample_index, response_token_ids FROM rollouts ORDER BY ALL"


def begin(refrain: Any, directory: Path, **changes: Any) -> Command:
    """Begin a run whose updates are too small to change a weight: all versions sample the same."""
    directory.mkdir()
    return refrain("train", write_config(directory, trainer__learning_rate=1e-30, **changes))


def answer(directory: Path, query: str) -> list[dict[str, Any]]:
    return query_all(directory / "runs" / "demo" / STORE_FILE, query).to_pylist()


def test_moved_and_stale_requests_have_the_tokens_of_a_run_in_turn(
    refrain: Any, tmp_path: Path
) -> None:
    """New weights come in the middle of responses, up to two versions late. One engine is slow, so
    its requests move to the other one."""
    begin(refrain, in_turn := tmp_path / "in_turn").finish()
    changes = {"staleness": 2, "rollout__oversample": 0.0, "rollout__weight_update": "in_flight"}
    command = begin(refrain, stale := tmp_path / "stale", **changes)
    command.wait_for_line("train step 2: rolling out")
    with slowed(stale / "runs" / "demo", num_engines=1):
        command.finish()
    reports = [json.loads(row["report"]) for row in answer(stale, "SELECT report FROM steps")]
    assert sum(report["metrics"]["rollout/num_migrated"] for report in reports) > 0
    versions = "SELECT count(*) AS num FROM rollouts WHERE policy_version < last_policy_version"
    assert answer(stale, versions)[0]["num"] > 0
    assert answer(stale, TOKENS) == answer(in_turn, TOKENS)
