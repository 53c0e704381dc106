"""Read runs from their directories, without contact to their processes."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from refrain.engines.learn.checkpoint import checkpoints_dir, latest_checkpoint
from refrain.engines.reports.runs import RunRecord
from refrain.engines.tracking.mlflow_run import RUN_FILE
from refrain.engines.tracking.progress_file import PROGRESS_FILE, read_progress, readable_steps
from refrain.engines.user_files import read_json_object, read_model
from refrain.schemas.config import TrainConfig
from refrain.schemas.progress import RunProgress
from refrain.schemas.step import RunSummary, StepReport
from refrain.tasks.run.crashes import read_crashes
from refrain.tasks.run.find import CONFIG_FILE, STORE_FILE, run_dirs
from refrain.tasks.run.run_dir import (
    SUMMARY_FILE,
    is_live,
    read_changes,
    read_config,
)

T = TypeVar("T")


def list_runs(runs_dir: Path) -> list[RunRecord]:
    """Return all runs, the oldest first. Raise ValueError when there is no such directory."""
    if not runs_dir.is_dir():
        raise ValueError(f"no directory {runs_dir}: give the directory of the runs as --runs-dir")
    return sorted(map(read_run, run_dirs(runs_dir)), key=lambda record: record.started_s)


def read_run(run_dir: Path) -> RunRecord:
    """Return the record of the run in a directory. `read_errors` lists unreadable files."""
    read_errors: list[str] = []

    def tried(read: Callable[[Path], T]) -> T | None:
        try:
            return read(run_dir)
        except ValueError as error:
            read_errors.append(str(error))
            return None

    live = is_live(run_dir)
    config = tried(_read_config)
    return RunRecord(
        run_dir=run_dir,
        live=live,
        config=config,
        progress=tried(_read_progress),
        summary=None if live else tried(_read_summary),
        steps=_read_steps(run_dir, read_errors),
        checkpoint=latest_checkpoint(checkpoints_dir(config)) if config else None,
        mlflow_run=tried(read_mlflow_run),
        modified_s=(run_dir / CONFIG_FILE).stat().st_mtime,
        changes=tried(read_changes) or (),
        crashes=tried(read_crashes) or (),
        read_errors=tuple(read_errors),
    )


def _read_config(run_dir: Path) -> TrainConfig:
    try:
        return read_config(run_dir)
    except ValueError as error:
        first, *values = str(error).splitlines()
        why = "; ".join(map(str.strip, values)) or first
        raise ValueError(
            f"{run_dir / CONFIG_FILE} cannot be read by this version: {why}"
        ) from error


def _read_summary(run_dir: Path) -> RunSummary | None:
    file = run_dir / SUMMARY_FILE
    try:
        return read_model(file, RunSummary) if file.exists() else None
    except ValueError as error:
        raise ValueError(f"{error}; `refrain train --resume {run_dir}` writes it again") from error


def _read_progress(run_dir: Path) -> RunProgress | None:
    found, file = read_progress(run_dir), run_dir / PROGRESS_FILE
    if found is None and file.exists():
        raise ValueError(f"{file} is damaged: the run writes it again when you resume it")
    return found


def _read_steps(run_dir: Path, read_errors: list[str]) -> list[StepReport]:
    """Return the reports of steps. Add problems with the files to `read_errors`."""
    try:
        reports, wrong = readable_steps(run_dir)
        read_errors += wrong[:1]
        if reports or wrong or not (run_dir / STORE_FILE).exists():
            return reports
        from refrain.engines.store.store import open_read_only

        with open_read_only(run_dir / STORE_FILE) as store:
            return store.steps()
    except ValueError as error:
        read_errors.append(str(error))
        return []


def read_mlflow_run(run_dir: Path) -> str | None:
    """Return the run's id in MLflow, or None before it has one. Raise ValueError for a damaged
    file."""
    file = run_dir / RUN_FILE
    if not file.exists():
        return None
    try:
        return str(read_json_object(file)["run_id"])
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"{file} is damaged: delete it. The run then continues as a new run in MLflow"
        ) from error
