"""What waits for what in the flow of a step."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.hollow import LocalStore, hollow_config, hollow_run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.mark.usefixtures("servers")
async def test_a_step_is_reported_when_the_one_before_is_drawn(tmp_path: Path) -> None:
    """Or pictures would pile up."""
    from prefect import flow

    from flows.step import rl_step

    config = hollow_config(tmp_path, "hollow", 64, 16)
    config.run_dir.mkdir()
    store = LocalStore(config.run_dir / "refrain.duckdb")
    may_draw = asyncio.Event()

    @flow
    async def steps() -> None:
        async with hollow_run(config, store, 2, 1000.0, None) as (live, _):
            reached, reach = live.milestones, live.milestones.drawn.reach

            async def reach_later(*args) -> None:
                await may_draw.wait()
                await reach(*args)

            reached.drawn.reach = reach_later  # type: ignore[method-assign]
            both = [
                asyncio.create_task(rl_step(step, live.ref, live.engines, reached))
                for step in (1, 2)
            ]
            await reached.published.wait(2)
            await asyncio.sleep(0.2)
            assert await store.call("last_step") == 1
            may_draw.set()
            assert [report.step for report in await asyncio.gather(*both)] == [1, 2]
            assert await store.call("last_step") == 2

    await steps()
