"""Write run directories without running anything."""

import time
from pathlib import Path

from refrain.engines.learn.checkpoint import CheckpointState
from refrain.engines.tracking.progress_file import PROGRESS_FILE, STEPS_FILE
from refrain.schemas.config import TrainConfig
from refrain.schemas.progress import Ending, Rolling, RunProgress
from refrain.schemas.step import RunSummary, StepReport
from refrain.tasks.run.run_dir import CONFIG_FILE, SUMMARY_FILE

ROLLING = Rolling(
    label="train step 3",
    num_finished=32,
    num_rollouts=96,
    num_in_flight_tokens=500,
    num_finished_tokens=1500,
    acceptance_rate=0.75,
    num_busy_engines=1,
    num_engines=2,
    elapsed_s=4.0,
)


def report(step: int, reward: float) -> StepReport:
    metrics = {
        "response_length/mean": 47.0,
        "rollout/tokens_per_s": 1234.0,
        "rollout/bubble_share": 0.25,
        "rollout/spec_accept_rate": 0.8,
        "rollout/spec_accept_length": 4.5,
    }
    timing = {"sync": 0.5, "rollout": 3.0, "reward": 0.25, "train": 6.0, "step": 10.0}
    return StepReport(
        step=step, epoch=(step - 1) // 2, reward_mean=reward, metrics=metrics, timing_s=timing
    )


def progress(
    ending: Ending | None = None,
    rolling: Rolling | None = None,
    error: str | None = None,
    started_s: float | None = None,
) -> RunProgress:
    """Return the progress of a process that took 10 seconds, after an earlier one that took 60."""
    started_s = time.time() - 10.0 if started_s is None else started_s
    return RunProgress(
        num_steps=4,
        phase="train step 3: rolling out",
        rolling=rolling,
        first_started_s=started_s - 100.0,
        started_s=started_s,
        earlier_s=60.0,
        updated_s=started_s + 10.0,
        ending=ending,
        error=error,
    )


def summary(steps: int) -> RunSummary:
    return RunSummary(
        steps=steps,
        num_rollouts=96,
        reward_first=0.5,
        reward_last=0.75,
        validation_first=0.25,
        validation_last=0.5,
        tokens_per_second=1000.0,
        wall_s=70.0,
        timing_s={},
    )


def make_run(
    runs_dir: Path,
    name: str,
    rewards: tuple[float, ...] = (),
    progress: RunProgress | None = None,
    summary: RunSummary | None = None,
) -> Path:
    """Write the files of a run and return its directory."""
    values = {"name": name, "runs_dir": str(runs_dir), "num_epochs": 2}
    values |= {"model": {"path": "m"}, "data": {"train": ["d.parquet"]}}
    run_dir = runs_dir / name
    run_dir.mkdir(parents=True)
    (run_dir / CONFIG_FILE).write_text(TrainConfig.model_validate(values).model_dump_json())
    steps = [report(step, reward) for step, reward in enumerate(rewards, 1)]
    lines = "".join(step.model_dump_json() + "\n" for step in steps)
    (run_dir / STEPS_FILE).write_text(lines)
    if progress:
        (run_dir / PROGRESS_FILE).write_text(progress.model_dump_json())
    if summary:
        (run_dir / SUMMARY_FILE).write_text(summary.model_dump_json())
    return run_dir


def make_checkpoint(run_dir: Path, step: int) -> Path:
    """Write a checkpoint with a state file and an empty model directory. Return its path."""
    checkpoint = run_dir / "checkpoints" / f"global_step_{step}"
    (checkpoint / "model").mkdir(parents=True)
    state = CheckpointState(step=step, policy_version=step, loader_state={}).sealed()
    (checkpoint / "state.json").write_text(state.model_dump_json())
    return checkpoint
