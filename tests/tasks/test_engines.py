"""Generation stages that end at the same time, and steps after the loss of an engine."""

import asyncio
from pathlib import Path

import pytest

from refrain.benchmarks.growth import take_step
from refrain.benchmarks.stand_ins import made_up_config
from refrain.benchmarks.timed_stubs import LocalStore, hollow_run
from refrain.engines.rollout.interface import EngineDied, EngineEvents, EngineGone
from refrain.schemas.rollout import Split


async def test_stages_that_end_at_once_have_timelines_in_their_order(tmp_path: Path) -> None:
    """This happens when a run is resumed and the store has all rollouts of both stages."""
    config = made_up_config(tmp_path, "hollow", 64, 16)
    config.run_dir.mkdir()
    store = LocalStore(config.run_dir / "refrain.duckdb")
    async with hollow_run(config, store, 2, 1000.0, None) as (live, _):
        engines, weights = live.engines, live.milestones.published.last

        async def nothing(*_: object) -> None:
            raise AssertionError("a stage without requests has finished one")

        async def stage(label: str) -> float:
            running = engines.coordinator.roll_out([], nothing, weights=weights, label=label)
            timeline = engines.timeline(await running)
            return timeline.end_s - timeline.start_s

        seconds = await asyncio.gather(stage("train/1"), stage("train/2"))
        assert min(seconds) >= 0.0


@pytest.mark.usefixtures("no_prefect")
async def test_steps_are_planned_with_the_engines_that_are_left(tmp_path: Path) -> None:
    config = made_up_config(tmp_path, "hollow", 64, 16)
    config.run_dir.mkdir()
    store = LocalStore(config.run_dir / "refrain.duckdb")
    async with hollow_run(config, store, 3, 1000.0, None) as (live, engines):

        async def die() -> EngineEvents:
            raise EngineDied(0, "killed")

        async def find_no_place() -> None:
            raise EngineGone(0, "no room")

        planned, gone, shares = [], [], []
        for step in (1, 2, 3):
            report, batch = await asyncio.wait_for(take_step(live, step), 60)
            plan = await store.call("plan", Split.TRAIN, step)
            planned.append({group.engine for group in plan.groups})
            gone.append(report.metrics["rollout/num_gone"])
            shares.append([share.engine for share in batch.shares])
            if step == 1:
                engines[0].next_events, engines[0].start = die, find_no_place
        said = [text for text in live.run.progress.said if "gone" in text or "going on" in text]
    assert planned == [{0, 1}, {0, 1}, {1}]
    assert gone == [0.0, 1.0, 0.0]
    assert shares == [[0, 1], [0, 1], [1]]
    assert said == ["rollout engine 0 died: no room; going on with 1 of 2 engines"]
