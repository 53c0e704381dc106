"""The bench of the driver notices when something blocks the event loop."""

import asyncio
import subprocess
import sys
import time
from argparse import Namespace

import pytest
from rich.console import Console

from refrain.benchmarks.driver import measure, watched
from refrain.benchmarks.driver_races import RacingEngine, race_at_once


async def test_waiting_holds_up_the_loop_and_takes_no_cpu_time():
    async with watched() as watch:
        await asyncio.sleep(0.01)
        time.sleep(0.1)
        await asyncio.sleep(0.01)
    assert watch.longest_s > 0.09
    assert watch.longest_cpu_s < 0.05


async def test_computing_takes_both():
    async with watched() as watch:
        await asyncio.sleep(0.01)
        began_s = time.thread_time()
        while time.thread_time() < began_s + 0.05:
            pass
        await asyncio.sleep(0.01)
    assert watch.longest_s > 0.04
    assert watch.longest_cpu_s > 0.04


def test_pandas_is_there_before_the_first_rewards() -> None:
    code = (
        "import asyncio, sys\n"
        "from refrain.engines.reward.pool import import_pandas\n"
        "assert 'pandas' not in sys.modules\n"
        "asyncio.run(import_pandas())\n"
        "assert 'pandas' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "sizes", [{"rollouts": 4}, {"rollouts": 12}, {"many_rollouts": 4}, {"tokens": 16}]
)
def test_sizes_that_make_no_sense_are_refused(sizes):
    with pytest.raises(ValueError, match=r"multiples of 8|above 16"):
        measure(Namespace(**{"rollouts": 8, "many_rollouts": 8, "tokens": 99} | sizes), Console())


async def test_events_do_not_wait_for_races():
    """Each copy and each submission takes six times as long as events may wait."""
    engines = [RacingEngine(i, export_s=0.3, import_s=0.3) for i in range(8)]
    assert await race_at_once(engines) < 0.05
