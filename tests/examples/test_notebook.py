"""Run the notebook from its first cell to its last, on a few prompts."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import Command

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SMALL = ("prompts_per_step=8", "rollout.num_engines=1", "data.validation=[]")


def test_notebook_cells_run(tmp_path: Path) -> None:
    notebook = REPOSITORY / "examples" / "notebook.ipynb"
    few = tmp_path / "few.parquet"
    pq.write_table(pq.read_table(DEMO / "data" / "train.parquet").slice(0, 8), few)
    cells = Command(
        notebook, tmp_path, *SMALL, f"data.train=[{few}]", module="tests.examples.cells"
    )
    try:
        cells.finish()
    finally:
        cells.close()
    (seen,) = [line for line in cells.lines if line.startswith("seen:")]
    seen = json.loads(seen.removeprefix("seen:"))
    assert [(row["step"], row["epoch"]) for row in seen["steps"]] == [(1, 0), (2, 1), (3, 2)]
    assert all(row["tokens"] > 0 and row["tokens_per_s"] > 0 for row in seen["steps"])
    assert [row["epoch"] for row in seen["lengths"]] == [0, 1, 2]
    assert all(0 < row["median_tokens"] <= row["max_tokens"] for row in seen["lengths"])
    assert seen["num_prompts"] == 8
    rewards = [sample["reward"] for sample in seen["samples"]]
    assert len(rewards) == 8
    assert rewards == sorted(rewards, reverse=True), "the responses to one prompt, best first"
    assert all(sample["response_token_ids"] for sample in seen["samples"])
