"""Generation stages that end together."""

import asyncio
from pathlib import Path

from benchmarks.hollow import LocalStore, hollow_run
from benchmarks.stand_ins import made_up_config


async def test_stages_that_end_at_once_have_timelines_in_their_order(tmp_path: Path) -> None:
    """As when a run is resumed whose rollouts are there already."""
    config = made_up_config(tmp_path, "hollow", 64, 16)
    config.run_dir.mkdir()
    store = LocalStore(config.run_dir / "refrain.duckdb")
    async with hollow_run(config, store, 2, 1000.0, None) as (live, _):
        engines, weights = live.engines, live.milestones.published.last

        async def nothing(*_: object) -> None:
            raise AssertionError("there is nothing to finish")

        async def stage(label: str) -> float:
            running = engines.coordinator.roll_out([], nothing, weights=weights, label=label)
            timeline = engines.timeline(await running)
            return timeline.end_s - timeline.start_s

        seconds = await asyncio.gather(stage("train/1"), stage("train/2"))
        assert min(seconds) >= 0.0
