"""Real runs whose environment fails in some conversations, and whose reward needs whole groups."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.flows.commands import write_config
from tests.flows.test_train import query

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

GROUP_SIZE, PROMPTS = 4, 4
ENVIRONMENT = """
class Fragile:
    def reset(self, task):
        self.broken = task.extra_info["index"] % 4 == 0

    def step(self, turn):
        if self.broken or len(turn.text) % 3 == 0:
            raise OSError("the service is down")
"""
REWARD = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    sizes = {{len(each) for each in (data_sources, solution_strs, ground_truths, extra_infos)}}
    (size,) = sizes
    with open({path!r}, "a") as file:
        file.write(f"{{size}}\\n")
    best = max(map(len, solution_strs))
    return [{{"score": len(text) / best, "num_in_group": size}} for text in solution_strs]
"""


def config_of(directory: Path, **changes: Any) -> Path:
    (directory / "fragile.py").write_text(ENVIRONMENT)
    (directory / "ranked.py").write_text(REWARD.format(path=str(directory / "sizes")))
    return write_config(
        directory,
        2 * PROMPTS,
        environment={"path": str(directory / "fragile.py"), "retries": 0, "processes": 1}
        | {"on_error": "leave_out"},
        reward={"type": "function", "path": str(directory / "ranked.py"), "group": True},
        num_epochs=1,
        rollout__group_size=GROUP_SIZE,
        rollout__num_engines=1,
        data__max_response_tokens=32,
        **changes,
    )


def test_failed_conversations_are_left_out(refrain: Any, tmp_path: Path) -> None:
    """The steps are pipelined, and defer no sample."""
    refrain("train", config_of(tmp_path, staleness=1)).finish()
    run_dir = tmp_path / "runs" / "demo"
    rows = query(
        run_dir,
        "SELECT split, step, prompt_key, sample_index, finish_reason = 'failed', reward, extra "
        "FROM rollouts LEFT JOIN rewards USING (split, step, prompt_key, sample_index)",
    )
    assert len({row[:4] for row in rows}) == len(rows)
    failed = [row for row in rows if row[4]]
    assert {row[0] for row in failed} == {"train", "validation"}
    assert all((row[5] is None) == (row[0] == "train" and row[4]) for row in rows)
    assert all(row[5] == 0.0 for row in failed if row[0] == "validation")
    finished = Counter(row[:3] for row in rows if not row[4])
    for row in rows:
        if not row[4]:
            assert json.loads(row[6])["num_in_group"] == finished[row[:3]]
    sizes = Counter(map(int, (tmp_path / "sizes").read_text().split()))
    assert sizes == Counter(finished.values())
    reports = query(run_dir, "SELECT step, report->>'$.metrics' FROM steps")
    for step, metrics in reports:
        num = sum(row[:2] == ("train", step) for row in failed)
        assert json.loads(metrics)["rollout/num_failed"] == num
    assert len(reports) == 2
