"""The loop in one file learns, drafts from history in its second epoch, and draws the same tokens
without drafts."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.conftest import REPOSITORY

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

LINE = re.compile(
    r"step +(\d+)  reward ([\d.]+)  accepted (\d+)/(\d+)  differ (\S+)  tokens ([0-9a-f]{8})"
)
SMALL = ("--max-prompts=8", "--prompts-per-step=8", "--group-size=4", "--max-response-tokens=128")
"""One step is an epoch, so the second step has a history."""


class Step(NamedTuple):
    number: int
    reward: float
    num_accepted: int
    num_drafted: int
    difference: float
    tokens: str


def steps_of(*options: str, directory: Path = REPOSITORY) -> list[Step]:
    """Run the loop in a copy of the repository, and return what it printed."""
    script = directory / "examples" / "minimal_loop.py"
    process = subprocess.Popen(
        [sys.executable, str(script), *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory)},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=540.0)
    finally:
        # The engine's process may outlive the loop if that is killed.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output + errors
    types = (int, float, int, int, float, str)
    lines = LINE.findall(output)
    return [Step(*(of(text) for of, text in zip(types, line, strict=True))) for line in lines]


def test_two_steps_with_and_without_drafts() -> None:
    drafted = steps_of("--steps=2")
    plain = steps_of("--steps=2", "--drafter=none")
    assert [step.number for step in drafted] == [1, 2]
    assert all(0.0 < step.reward < 1.0 for step in drafted)
    assert all(step.difference < 1e-5 for step in drafted), "engine and trainer differ"
    first, second = drafted
    assert first.num_accepted == 0, "there is no history yet"
    assert second.num_accepted > 0.2 * second.num_drafted > 0
    assert first.tokens != second.tokens
    assert [step.num_drafted for step in plain] == [0, 0]
    assert [step.tokens for step in plain] == [step.tokens for step in drafted]
