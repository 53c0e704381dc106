"""Traces of a run: its store, its summary, MLflow, its processes and files."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from sqlite3 import connect

import psutil

from refrain.benchmarks.chaos.checks import RecordedSample, RunTraces, SampleKey
from refrain.engines.store.store import Store
from refrain.schemas.rollout import Split
from refrain.schemas.step import RunSummary
from refrain.tasks.run.run_dir import REF_FILE, STORE_FILE, SUMMARY_FILE

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
    """Return the record of a run that has ended, without processes and files."""
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
    """Whether a run ended before MLflow and Prefect received all its records. Resuming it delivers
    the rest."""
    file = run_dir / SUMMARY_FILE
    return file.exists() and bool(RunSummary.model_validate_json(file.read_text()).missing)


def described(path: Path) -> str:
    """Return the name of a file, or of a directory with its content."""
    held = sorted(inner.name for inner in path.iterdir()) if path.is_dir() else []
    return f"{path.name} ({', '.join(held[:MAX_NAMED])})" if held else path.name


def shared_by(processes: Iterable[int]) -> set[str]:
    """Return the files in shared memory that these processes have open or mapped."""
    found: set[str] = set()
    for pid in processes:
        for path in _opened(Path("/proc", str(pid))):
            if path.startswith(f"{SHARED_MEMORY}/"):
                name = path.removeprefix(f"{SHARED_MEMORY}/").removesuffix(" (deleted)")
                found.add(name.split("/")[0])
    return found


def held_by_nobody(names: set[str]) -> set[str]:
    """Return those of these files in shared memory that exist and that no process has open."""
    there = {name for name in names if (SHARED_MEMORY / name).exists()}
    return there - shared_by(psutil.pids()) if there else there


def _opened(process: Path) -> list[str]:
    """Return the files that a process has open or mapped. Empty if it has just ended."""
    found = []
    with suppress(OSError):
        lines = (process / "maps").read_text().splitlines()
        found += [line[line.index("/") :] for line in lines if "/" in line]
        for link in (process / "fd").iterdir():
            # A file may close while this reads its link.
            with suppress(OSError):
                found.append(str(link.readlink()))
    return found


def live_by_record(run_dir: Path) -> list[str]:
    """Return the names of the places that list an ended run as live."""
    found = [REF_FILE] if (run_dir / REF_FILE).exists() else []
    status, _ = _mlflow(run_dir)
    if status == "RUNNING":
        found.append("MLflow's run")
    with closing(connect(run_dir.parent / ".prefect" / "prefect.db")) as prefect:
        live = "SELECT name FROM flow_run WHERE state_type IN ('PENDING', 'RUNNING')"
        found += [f"Prefect's {name}" for (name,) in prefect.execute(live)]
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
                # A deferred sample has -1 - index.
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
