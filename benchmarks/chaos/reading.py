"""Traces of a run: its store, its summary, MLflow, its processes and files."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from benchmarks.chaos.checks import RecordedSample, RunTraces, SampleKey
from engines.store.store import Store
from schemas.rollout import Split
from schemas.step import RunSummary
from tasks.run.run_dir import STORE_FILE, SUMMARY_FILE

LOCK_TIMEOUT_S = 60.0
SHARED_MEMORY = Path("/dev/shm")
MAX_NAMED = 5
COLUMNS = (
    "step",
    "origin_step",
    "prompt_key",
    "sample_index",
    "response_token_ids",
    "finish_reason",
    "version_spans",
)


def read_record(run_dir: Path, num_steps: int) -> RunTraces:
    """Record of a run that has ended, without processes and files."""
    file = run_dir / SUMMARY_FILE
    summary = RunSummary.model_validate_json(file.read_text()) if file.exists() else None
    samples: list[RecordedSample] = []
    planned: set[SampleKey] = set()
    with Store(run_dir / STORE_FILE, read_only=True, lock_timeout_s=LOCK_TIMEOUT_S) as store:
        for split in Split:
            for step in range(num_steps + 1):
                samples += _samples(store, split, step)
                planned |= _planned(store, split, step)
        steps = tuple(report.step for report in store.steps())
    status, by_metric = _mlflow(run_dir)
    return RunTraces(
        num_steps=num_steps,
        samples=tuple(samples),
        planned=frozenset(planned),
        steps=steps,
        summary_steps=summary.steps if summary else None,
        missing=summary.missing if summary else (),
        mlflow_status=status,
        mlflow_steps=by_metric,
    )


def undelivered(run_dir: Path) -> bool:
    """Whether a run has ended before MLflow and Prefect took all of its record: a resume of it
    delivers the rest."""
    file = run_dir / SUMMARY_FILE
    return file.exists() and bool(RunSummary.model_validate_json(file.read_text()).missing)


def described(path: Path) -> str:
    """Name of a file, or of a directory and what it holds."""
    held = sorted(inner.name for inner in path.iterdir()) if path.is_dir() else []
    return f"{path.name} ({', '.join(held[:MAX_NAMED])})" if held else path.name


def shared_memory_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def held_by_nobody(names: set[str]) -> set[str]:
    """Files in shared memory that no process has open: who made them is dead."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        text = "\n".join(_opened(process))
        held |= {name for name in names if f"{SHARED_MEMORY}/{name}" in text}
    return names - held


def _opened(process: Path) -> list[str]:
    """Files that it has open or mapped; none for one that has just ended."""
    found = []
    with suppress(OSError):
        found.append((process / "maps").read_text())
        for link in (process / "fd").iterdir():
            # Some close while they are looked at.
            with suppress(OSError):
                found.append(str(link.readlink()))
    return found


def _samples(store: Store, split: Split, step: int) -> Iterator[RecordedSample]:
    rewarded = {
        (row["prompt_key"], row["sample_index"]) for row in store.rewards(split, step).to_pylist()
    }
    for row in store.rollouts(split, step, COLUMNS).to_pylist():
        index = row["sample_index"]
        yield RecordedSample(
            key=SampleKey(
                str(split),
                row["origin_step"],
                row["prompt_key"],
                # A deferred one's is -1 - index.
                index if index >= 0 else -1 - index,
            ),
            step=row["step"],
            token_ids=tuple(row["response_token_ids"]),
            finish_reason=row["finish_reason"],
            versions=tuple(span["policy_version"] for span in row["version_spans"]),
            rewarded=(row["prompt_key"], index) in rewarded,
        )


def _planned(store: Store, split: Split, step: int) -> set[SampleKey]:
    plan = store.plan(split, step)
    if plan is None:
        return set()
    return {
        SampleKey(str(split), step, group.prompt_key, index)
        for group in plan.groups
        for index in range(plan.group_size)
    }


def _mlflow(run_dir: Path) -> tuple[str | None, dict[str, tuple[int, ...]]]:
    from mlflow import MlflowClient

    file = run_dir / "mlflow.json"
    if not file.exists():
        return None, {}
    client = MlflowClient(f"sqlite:///{run_dir.parent}/mlflow.db")
    run_id = json.loads(file.read_text())["run_id"]
    run = client.get_run(run_id)
    steps: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)
    for name in run.data.metrics:
        history = client.get_metric_history(run_id, name)
        steps[name] = tuple(sorted({metric.step for metric in history}))
    return run.info.status, dict(steps)
