"""Steps wait for each other, and for the results of earlier steps."""

import asyncio

import pytest

from refrain.tasks.run.milestones import Milestone


async def test_milestone_keeps_values_of_the_last_steps():
    milestone = Milestone(3, "c", num_kept=2)
    assert (milestone.last, await milestone.left_by(3)) == ("c", "c")
    waiting = asyncio.create_task(milestone.left_by(5))
    for step, left in ((4, "d"), (5, "e")):
        assert not waiting.done()
        await milestone.reach(step, left)
        await asyncio.sleep(0)
    assert await waiting == milestone.last == "e"
    assert await milestone.left_by(4) == "d"
    with pytest.raises(KeyError):
        await milestone.left_by(3)


async def test_steps_reach_a_milestone_in_order():
    milestone = Milestone(0, None)
    second = asyncio.create_task(milestone.reach(2, None))
    await asyncio.sleep(0)
    assert milestone.reached == 0
    await milestone.reach(1, None)
    await second
    assert milestone.reached == 2
    with pytest.raises(AssertionError, match="step 2 after step 2"):
        await milestone.reach(2, None)
