"""A step is drawn after its report. If the process dies before that, a resumed run draws it."""

import asyncio
import errno
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Never

import pytest

from refrain.benchmarks.growth import take_step
from refrain.benchmarks.stand_ins import made_up_config
from refrain.benchmarks.timed_stubs import LocalStore, hollow_run
from refrain.schemas.config import TrainConfig
from refrain.tasks.report import draw_left, draw_step
from refrain.tasks.run.attach import Run

pytestmark = pytest.mark.usefixtures("no_prefect")

BREAKABLE = (
    "refrain.engines.tracking.tracker.timeline_page",
    "refrain.engines.tracking.tracker.write_timeline",
    "refrain.tasks.report.step_page",
    "refrain.tasks.report.saving_metrics",
    "refrain.tasks.run.timeline.step_requests",
)
"""Functions that only show a step. None of them may end a run."""
FOLDERS = ("timelines", "rollouts")


def two_steps(directory: Path) -> tuple[TrainConfig, LocalStore]:
    """Return the config and the store of a run of two steps, of 64 rollouts each."""
    config = made_up_config(directory, "hollow", 64, 16)
    config.run_dir.mkdir()
    return config, LocalStore(config.run_dir / "refrain.duckdb")


async def with_hidden(file: Path, work: Awaitable[None]) -> None:
    aside = file.rename(file.with_suffix(".aside"))
    await work
    aside.rename(file)


def artifacts(run: Run) -> set[str]:
    from mlflow import MlflowClient

    run.tracker.flush()
    client = MlflowClient(f"sqlite:///{run.config.runs_dir / 'mlflow.db'}")
    paths = [a.path for f in FOLDERS for a in client.list_artifacts(run.tracker.run_id, f)]
    return set(paths)


def pages(run: Run) -> list[str]:
    files = run.config.run_dir.glob("outbox/prefect/*/page.md")
    return [file.read_text() for file in sorted(files)]


async def test_resumed_run_draws_missing_pages(tmp_path: Path, record_failures: list):
    config, store = two_steps(tmp_path)
    async with hollow_run(config, store, 2, 1000.0, None) as (live, _):
        report, batch = await take_step(live, 1)
        await draw_step.fn(live.ref, report, batch)
        await take_step(live, 2)
        drawn = await asyncio.to_thread(artifacts, live.run)
    assert {path for path in drawn if path.endswith(".html")} == {
        "timelines/train-00001.html",
    }
    first, second = await store.call("steps")
    assert first.drawn
    assert not second.drawn
    assert "saved_s/drafting" in first.metrics
    assert "saved_s/drafting" not in second.metrics

    async with hollow_run(config, store, 2, 1000.0, None) as (live, _):
        assert len(pages(live.run)) == 1
        timeline = config.run_dir / "timelines" / "train-00002.json"
        await with_hidden(timeline, draw_left(live.run))
        ((what, error),) = record_failures
        record_failures.clear()
        assert (what, f"{timeline} does not exist" in str(error)) == ("drawing a step", True)
        assert live.run.progress.said[-1].startswith("drawing a step failed, the run goes on")
        await draw_left(live.run)
        assert len(pages(live.run)) == 2
        assert "# Step 2 of 2" in pages(live.run)[1]
        again = {path.replace("00001", "00002") for path in drawn}
        assert await asyncio.to_thread(artifacts, live.run) == drawn | again
        _, second = await store.call("steps")
        assert second.drawn
        assert second.metrics.keys() == first.metrics.keys()
        await draw_left(live.run)
        assert len(pages(live.run)) == 2


async def test_nothing_that_only_shows_a_step_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_failures: list
):
    def fail(*_: Any, **__: Any) -> Never:
        raise OSError(errno.ENOSPC, "No space left on device")

    config, store = two_steps(tmp_path)
    async with hollow_run(config, store, len(BREAKABLE), 1000.0, None) as (live, _):
        for step, function in enumerate(BREAKABLE, start=1):
            with monkeypatch.context() as broken:
                broken.setattr(function, fail)
                report, batch = await take_step(live, step)
                await draw_step.fn(live.ref, report, batch)
            assert record_failures, function
            assert {error.errno for _, error in record_failures[:1]} == {errno.ENOSPC}
            record_failures.clear()
        said = live.run.progress.said
        counts = live.run.failures.counts
    assert len(await store.call("steps")) == len(BREAKABLE)
    warnings = [text for text in said if "failed, the run goes on" in text]
    assert len(warnings) == len(counts), "more than one warning for a kind of failure"
