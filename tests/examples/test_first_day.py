"""Follow the page of the example as a new user would, from raw rows of GSM8K to a training run."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import Command

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_COMMANDS = 10
"""The page must need fewer commands from raw rows to a run."""
SMALL = (
    f"model.path={DEMO / 'model'}",
    "model.dtype=float32",
    "data.template_arguments={}",
    "data.max_prompt_tokens=256",
    "data.max_response_tokens=64",
    "prompts_per_step=8",
    "max_steps=2",
    "validate_every_steps=0",
    "trainer.num_threads=1",
)
"""Overrides that replace the page's model by the demo's, with small sizes."""


def commands_of(page: Path) -> list[list[str]]:
    (block,) = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    return [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]


def test_from_raw_rows_to_a_run(tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.mkdir()
    for split, first in (("train", 3), ("test", 200)):
        rows = [
            {"question": f"Tom has {n} apples, eats 2. How many?", "answer": f"{n}-2\n#### {n - 2}"}
            for n in range(first, first + 24)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (raw / f"{split}.jsonl").write_text(text)
    commands = commands_of(REPOSITORY / "examples" / "gsm8k" / "README.md")
    assert len(commands) < MAX_COMMANDS
    assert [command[:2] for command in commands] == [
        ["refrain", "data"],
        ["refrain", "train"],
        ["refrain", "train"],
    ]
    data, _, train = commands
    local = [f"--from={raw / split}.jsonl" for split in ("train", "test")]
    out = tmp_path / "data"
    run(*data[1:], *local, f"--out={out}")
    files = (f"data.train={out / 'train.parquet'}", f"data.validation={out / 'test.parquet'}")
    there = (*SMALL, *files, f"runs_dir={tmp_path / 'runs'}")
    run(*train[1:], *there, "--check")
    assert "reward" in run(*train[1:], *there)
    summary = json.loads((tmp_path / "runs" / "gsm8k" / "summary.json").read_text())
    assert (summary["steps"], summary["num_rollouts"]) == (2, 128)


def run(*args: str) -> str:
    return Command(*args).finish()
