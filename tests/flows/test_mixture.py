"""A real run over two sources, with a reward of one source's own and a curriculum."""

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from refrain.engines.store.store import open_read_only
from refrain.schemas.rollout import Split
from tests.conftest import DEMO
from tests.flows.commands import Command, write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

LENIENT = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(abs(int(ground_truth)) % 2)
"""


def test_a_run_mixes_sources_and_skips_what_is_solved(tmp_path: Path) -> None:
    table = pq.read_table(DEMO / "data" / "train.parquet")
    sources = [{"name": "sums", "weight": 1}, {"name": "lenient", "weight": 2}]
    for at, source in enumerate(sources):
        file = tmp_path / f"{source['name']}.parquet"
        pq.write_table(table.slice(12 * at, 12), file)
        source["files"] = str(file)
    (tmp_path / "lenient.py").write_text(LENIENT)
    sources[1]["reward"] = {"type": "function", "path": str(tmp_path / "lenient.py")}
    config = write_config(
        tmp_path,
        num_prompts=12,
        rollout__num_engines=1,
        data__train=sources,
        data__validation=[],
        data__curriculum={},
    )
    command = Command("train", config, "max_steps=6", "rollout.group_size=4")
    try:
        command.finish()
    finally:
        command.close()
    with open_read_only(tmp_path / "runs" / "demo" / "refrain.duckdb") as store:
        reports = store.steps()
        plans = [store.plan(Split.TRAIN, step) for step in range(1, 7)]
        rewards = [store.rewards(Split.TRAIN, step).to_pylist() for step in range(1, 7)]
    for plan in plans:
        assert plan
        assert Counter(group.source for group in plan.groups) == {"sums": 2, "lenient": 4}
    lenient = {g.prompt_key for plan in plans for g in plan.groups if g.source == "lenient"}
    solved: dict[str, float] = {}
    for row in rewards[0] + rewards[1] + rewards[2] + rewards[3]:
        if row["prompt_key"] in lenient:
            assert row["reward"] in (0.0, 1.0)
            solved[row["prompt_key"]] = row["reward"]
            assert json.loads(row["extra"]) == {}
    for report in reports:
        assert report.metrics["source/lenient/share"] == pytest.approx(2 / 3)
        assert 0.0 <= report.metrics["source/sums/pass_rate"] <= 1.0
    shares = [report.metrics["curriculum/skipped_share"] for report in reports]
    assert shares[:4] == [0.0] * 4
    # Each prompt of one source is always or never solved.
    assert shares[4] == shares[5] >= 0.5
