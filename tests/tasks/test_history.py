"""A step waits a limited time for its indexes, and knows which prompts have one."""

import asyncio
from types import SimpleNamespace

import pyarrow as pa

from refrain.schemas.rollout import Split
from refrain.schemas.step import RolloutOutcome, SampleName
from refrain.tasks import history
from refrain.tasks.reward import last_rolled_out


class Slow:
    """History workers that take a minute."""

    def __init__(self) -> None:
        self.task: asyncio.Task | None = None

    def prepare(self, wanted, read_rows):
        del wanted, read_rows
        self.task = asyncio.create_task(asyncio.sleep(60.0, 1))
        return self.task


async def test_step_waits_limited_time_while_indexing_continues(monkeypatch):
    monkeypatch.setattr(history, "WAIT_S", 0.01)
    said, slow = [], Slow()

    async def store(*_):
        return {"a": 1}

    progress = SimpleNamespace(phase=said.append)
    run = SimpleNamespace(store=store, history=slow, progress=progress)
    assert await history.index_prompts(run, Split.TRAIN, 2, ["a"]) == 0
    assert "some prompts have no drafts" in said[0]
    # The task goes on: whoever awaits it next notices a worker that hangs.
    assert slow.task is not None
    assert not slow.task.done()
    slow.task.cancel()


def test_a_prompt_is_indexed_when_its_last_sample_is_there():
    def names(*pairs):
        return tuple(SampleName(prompt_key=key, sample_index=i) for key, i in pairs)

    own = pa.table({"prompt_key": ["a", "a", "b", "d"]})
    outcome = RolloutOutcome(deferred=names(("b", 1)), carried=names(("c", -1), ("d", -2)))
    # The sample of b that was deferred is missing. The store has a later rollout of d.
    assert last_rolled_out(5, own, outcome) == {"a": 5, "c": 4, "d": 5}
