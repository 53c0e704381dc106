"""A process that does not drive a run can run its tasks."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from refrain.schemas.run import RunRef
from refrain.tasks.run.attach import RunNotLive, attach
from refrain.tasks.run.run_dir import REF_FILE
from tests.conftest import REPOSITORY
from tests.flows.commands import write_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

NUM_PROMPTS, GROUP_SIZE = 8, 8
WAIT_S = 400.0


class Driver:
    """A process that has rolled out the first step of a run."""

    def __init__(self, config: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tasks.drive", str(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=environment(),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def said(self, word: str) -> str:
        """Wait for a line that starts with this word and return the rest of it."""
        while not (line := self._lines.get(timeout=WAIT_S)).startswith(word):
            assert line, f"the driver ended before it printed {word}"
        return line.removeprefix(word)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")


def environment() -> dict[str, str]:
    """Return the environment without a cluster and without a Prefect server. Pages wait in the
    run's directory."""
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return kept | {"PREFECT_API_URL": "http://127.0.0.1:9/api"}


def elsewhere(run_dir: Path, batch: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run `tests.tasks.other_process` in another working directory."""
    command = [sys.executable, "-m", "tests.tasks.other_process", str(run_dir), batch]
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=directory,
        env=environment() | {"PYTHONPATH": path},
        timeout=WAIT_S,
        check=False,
    )


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    changes = {"prompts_per_step": NUM_PROMPTS, "rollout__num_engines": 1}
    driver = Driver(write_config(tmp_path, NUM_PROMPTS, **changes))
    yield driver
    if driver.process.poll() is None:
        driver.process.terminate()
        driver.process.wait(60)


@pytest.mark.slow
def test_tasks_run_from_another_process(driver: Driver, tmp_path: Path) -> None:
    batch = driver.said("BATCH ")
    run_dir = tmp_path / "runs" / "demo"
    run = RunRef.model_validate_json((run_dir / REF_FILE).read_text())
    done = elsewhere(run_dir, batch, tmp_path)
    assert done.returncode == 0, done.stderr
    results = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " {" in line)
    rewarded, history, trained = (
        json.loads(results[name]) for name in ("RewardedBatch", "HistoryReport", "TrainReport")
    )
    assert rewarded["num_rollouts"] == NUM_PROMPTS * GROUP_SIZE
    assert 0.0 < rewarded["reward_mean"] < 1.0
    assert history["num_indexed"] == NUM_PROMPTS
    assert (trained["step"], trained["policy_version"]) == (1, 1)
    assert trained["num_tokens"] == json.loads(batch)["num_tokens"]

    driver.end()
    assert driver.said("VERSION ").strip() == "1", "trained another trainer than the run's"
    driver.process.wait(WAIT_S)
    with pytest.raises(
        RunNotLive, match=f"not live: start it with refrain train --resume {run_dir}"
    ):
        attach(run)
