"""No schedule changes a token: a run with stale requests against one in turn."""

from pathlib import Path
from typing import Any

import pytest

from refrain.engines.store.archive import query_all
from refrain.tasks.run.run_dir import STORE_FILE
from tests.flows.commands import write_config

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = "SELECT step, prompt_key, sample_index, response_token_ids FROM rollouts ORDER BY ALL"
LAG = "SELECT max(step - 1 - policy_version) AS versions FROM rollouts WHERE split = 'train'"
"""Policy versions that the stalest response is behind."""


def trained(refrain: Any, directory: Path, **changes: Any) -> Path:
    """Return the store of a run whose updates are too small to change a weight: all policy versions
    sample the same tokens."""
    directory.mkdir()
    config = write_config(directory, trainer__learning_rate=1e-30, **changes)
    refrain("train", config).finish()
    return directory / "runs" / "demo" / STORE_FILE


def test_stale_requests_have_the_tokens_of_a_run_in_turn(refrain: Any, tmp_path: Path) -> None:
    changes = {"staleness": 2, "rollout__oversample": 0.0, "rollout__weight_update": "in_flight"}
    in_turn = trained(refrain, tmp_path / "in_turn")
    stale = trained(refrain, tmp_path / "stale", **changes)
    lags = [query_all(store, LAG).to_pylist()[0]["versions"] for store in (in_turn, stale)]
    assert lags == [0, 2]
    assert query_all(stale, TOKENS).equals(query_all(in_turn, TOKENS))
