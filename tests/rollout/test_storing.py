"""Rollouts of several engines are stored together, and each counts once."""

import asyncio
from collections import Counter

import pytest

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.interface import EngineDied
from refrain.engines.rollout.moves import Race
from refrain.schemas.rollout import DraftSetting, RequestId
from tests.rollout.fakes import FakeEngine, request, weights

NUM_ENGINES = 8
STORE_S = 0.03


class SlowStore:
    """Takes a while for each call. Can lose the first rollouts of one engine."""

    def __init__(self, loses: int | None = None, fails: bool = False) -> None:
        self.counts: Counter[RequestId] = Counter()
        self.num_calls = self.most_at_once = 0
        self._at_once = 0
        self._loses, self._fails = loses, fails

    async def keep(self, rollouts) -> None:
        self._at_once += 1
        self.num_calls += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await asyncio.sleep(STORE_S)
        finally:
            self._at_once -= 1
        engine = rollouts[0].engine
        if engine == self._loses:
            if self._fails:
                raise RuntimeError("the store is broken")
            self._loses = None
            raise EngineDied(engine, "rows lost")
        self.counts.update(rollout.id for rollout in rollouts)


async def roll_out(store: SlowStore, policies=(), num_rounds: int = 3):
    engines = [FakeEngine(i) for i in range(NUM_ENGINES)]
    coordinator = Coordinator(engines, policies)
    await coordinator.start()
    requests = [
        (engine, request(f"p{engine}", 3 + 2 * i, i))
        for engine in range(NUM_ENGINES)
        for i in range(num_rounds)
    ]
    stage = coordinator.roll_out(requests, store.keep, weights=weights())
    outcome = await asyncio.wait_for(stage, 20)
    assert sum(share.num_rollouts for share in outcome.shares) == len(requests)
    assert set(store.counts) == {r.id for _, r in requests}
    return engines, outcome


async def test_engines_that_report_together_are_stored_together():
    store = SlowStore()
    await roll_out(store)
    assert store.most_at_once >= NUM_ENGINES - 1
    assert set(store.counts.values()) == {1}


async def test_only_the_engine_whose_rows_are_lost_dies():
    store = SlowStore(loses=5)
    engines, _ = await roll_out(store)
    assert [engine.num_starts for engine in engines] == [1, 1, 1, 1, 1, 2, 1, 1]
    assert set(store.counts.values()) == {1}


async def test_an_error_of_the_store_fails_the_stage():
    with pytest.raises(RuntimeError, match="the store is broken"):
        await roll_out(SlowStore(loses=5, fails=True))


class RaceAll:
    """Races each request on the next engine."""

    def decide(self, view):
        setting = DraftSetting("slow", 1)
        return [
            Race(id, (id.sample_index + engine.engine + 1) % NUM_ENGINES, setting)
            for engine in view.engines
            for id in engine.progress
        ]


async def test_copies_that_finish_together_count_once():
    store = SlowStore()
    _, outcome = await roll_out(store, [RaceAll()])
    assert outcome.moves.num_raced
    assert set(store.counts.values()) == {1}
