"""Real runs: signals end them and nothing is left, and one resumes by itself after crashes."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from refrain.benchmarks.chaos.run_traces import held_by_nobody, live_by_record, shared_by
from refrain.tasks.run.crashes import read_crashes
from tests.flows.commands import write_config
from tests.flows.test_train import assert_complete, processes

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]
END_S = 60.0


def signs(run_dir: Path) -> list[str]:
    """Return what is still alive of a run that has ended, after its cleaner has had time."""
    deadline = time.monotonic() + END_S
    while processes(run_dir) and time.monotonic() < deadline:
        time.sleep(0.5)
    names = [" ".join(process.cmdline())[:80] for process in processes(run_dir)]
    return [*names, *live_by_record(run_dir)]


@pytest.mark.parametrize(
    ("line", "signals"),
    [
        ("train step 1: rolling out", [signal.SIGHUP]),
        ("starting Ray", [signal.SIGTERM]),
        ("train step 1: rolling out", [signal.SIGINT, signal.SIGINT]),
        ("train step 1: rolling out", [signal.SIGKILL]),
    ],
    ids=["HUP", "TERM while it starts", "INT twice", "KILL"],
)
def test_nothing_is_left(refrain: Any, tmp_path: Path, line: str, signals: list[int]) -> None:
    command, run_dir = refrain("train", write_config(tmp_path)), tmp_path / "runs" / "demo"
    command.wait_for_line(line)
    shared = shared_by(process.pid for process in processes(run_dir))
    for number in signals:
        command.process.send_signal(number)
        time.sleep(0.5)
    at_once = signals[-1] == signal.SIGKILL or len(signals) == 2
    assert command.process.wait(END_S) == (-signals[-1] if at_once else 130)
    assert signs(run_dir) == []
    assert held_by_nobody(shared) == set()
    if signals == [signal.SIGHUP]:
        refrain("train", "--resume", run_dir).finish()
        assert_complete(run_dir)


def test_run_resumes_after_crashes(refrain: Any, tmp_path: Path) -> None:
    """The test kills a trainer rank in step 2 and Ray in step 3."""
    config = write_config(tmp_path, trainer__save_every_steps=1)
    command, run_dir = refrain("train", config), tmp_path / "runs" / "demo"
    command.wait_for_line("step 2: training")
    kill(run_dir, "ray::TrainerActor")
    command.wait_for_line("resuming from the last checkpoint (2 more allowed)")
    command.wait_for_line("train step 3: rolling out")
    kill(run_dir, "raylet/raylet")
    command.wait_for_line("resuming from the last checkpoint (1 more allowed)")
    command.finish()
    assert_complete(run_dir)
    assert signs(run_dir) == []
    trainer, ray = read_crashes(run_dir)
    # The previous step may not have been reported yet.
    assert trainer.step in (0, 1)
    assert ray.step in (1, 2)
    assert "trainer rank 0" in trainer.error
    assert "Ray has died under the run" in ray.error
    assert json.loads((run_dir / "summary.json").read_text())["missing"] == []
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    run = client.get_run(json.loads((run_dir / "mlflow.json").read_text())["run_id"])
    assert (run.info.status, run.data.tags["refrain.crashes"]) == ("FINISHED", "2")


def kill(run_dir: Path, title: str) -> None:
    found: list[psutil.Process] = []
    for process in processes(run_dir):
        if title in " ".join(process.cmdline()):
            found.append(process)
    assert found
    found[0].kill()
