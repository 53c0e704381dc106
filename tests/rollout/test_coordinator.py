"""The coordinator on fake engines: no rollout is lost or done twice, and no stage hangs."""

import asyncio

import pytest

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.deaths import MAX_IN_VAIN, MAX_RESTARTS, Deaths
from refrain.engines.rollout.interface import EngineDied, EngineFails, WeightSyncError
from tests.rollout.fakes import FakeEngine, Recorder, request, weights

REQUESTS = [(i % 2, request(f"p{i}", 3 + 5 * (i % 4))) for i in range(12)]


async def roll_out(engines, assignments=REQUESTS, policies=(), max_restarts=3):
    coordinator = Coordinator(engines, policies, max_restarts)
    await coordinator.start()
    await coordinator.load_weights(weights())
    finished = []

    async def keep(rollouts):
        finished.extend(rollouts)

    outcome = await asyncio.wait_for(coordinator.roll_out(assignments, keep), 20)
    return {r.request.id: tuple(r.generated.token_ids) for r in finished}, finished, outcome.shares


async def test_every_request_finishes_exactly_once():
    tokens, finished, shares = await roll_out([FakeEngine(0), FakeEngine(1)])
    assert len(finished) == len(tokens) == len(REQUESTS)
    assert [share.num_rollouts for share in shares] == [6, 6]
    assert sum(share.num_tokens for share in shares) == sum(len(t) for t in tokens.values())


async def test_a_dead_engines_requests_go_to_the_living_and_it_comes_back():
    dying = FakeEngine(1, die_at_tick=2)
    other = FakeEngine(0)
    tokens, finished, shares = await roll_out([other, dying])
    assert len(finished) == len(tokens) == len(REQUESTS)
    assert tokens == (await roll_out([FakeEngine(0)], [(0, r) for _, r in REQUESTS]))[0]
    assert dying.num_starts == 2
    assert dying.version == 0
    assert shares[1].num_restarts == 1


async def test_an_engine_that_keeps_dying_fails_the_stage_by_name():
    engine = FakeEngine(0, die_at_tick=2)
    engine.always_dies = True
    with pytest.raises(EngineDied, match="engine 0 died: killed by the test"):
        await roll_out([engine], [(0, r) for _, r in REQUESTS], max_restarts=2)
    assert engine.num_starts == 3


@pytest.mark.parametrize(("works", "num_restarts"), [(True, MAX_RESTARTS), (False, MAX_IN_VAIN)])
def test_an_engine_that_works_in_between_is_restarted_more_often(works, num_restarts):
    deaths, death = Deaths(), EngineDied(0, "killed by the test")
    for _ in range(num_restarts):
        if works:
            deaths.note_work(0)
        deaths.count(death)
    if works:
        deaths.note_work(0)
    with pytest.raises(EngineDied, match="killed by the test"):
        deaths.count(death)


class Doomed(FakeEngine):
    """Dies in the first steps after each start: of `errors` in turn, then of the last one again.
    By then it has finished short requests only."""

    def __init__(self, *errors: str) -> None:
        super().__init__(0)
        self.errors = errors

    async def next_events(self):
        events = await super().next_events()
        if self.tick >= 5:
            root = self.errors[min(self.num_starts, len(self.errors)) - 1]
            raise EngineDied(self.index, f"failed: {root}", root)
        return events


@pytest.mark.parametrize(
    ("errors", "num_tokens", "num_starts"),
    [
        (["bad head_dim"], 9, 2),
        (["out of memory", "bad head_dim"], 9, 3),
        # An engine that was killed may work after a restart: use all restarts.
        ([""], 9, 4),
        # The engine finished requests in its first life: that death does not count as the same.
        (["bad batch"], 1, 3),
    ],
)
async def test_engine_that_keeps_dying_early_is_given_up(errors, num_tokens, num_starts):
    engine = Doomed(*errors)
    todo = [request(f"p{i}", num_tokens if i < 4 else 99) for i in range(8)]
    with pytest.raises(EngineDied) as raised:
        await roll_out([engine], [(0, r) for r in todo], max_restarts=3)
    assert engine.num_starts == num_starts
    assert isinstance(raised.value, EngineFails) is (num_starts < 4)
    assert errors[-1] in str(raised.value)


async def test_a_wrong_engine_fails_closed():
    with pytest.raises(WeightSyncError, match="engine 1 differs"):
        await roll_out([FakeEngine(0), FakeEngine(1, wrong=True)])


async def test_a_failure_to_keep_a_rollout_is_not_swallowed():
    coordinator = Coordinator([FakeEngine(0)])
    await coordinator.start()
    await coordinator.load_weights(weights())

    async def full_disk(_):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        await coordinator.roll_out([(0, request("p", 3))], full_disk)


@pytest.mark.parametrize("lost", [(0,), (1, 3, 4)])
async def test_rollouts_that_are_lost_before_they_are_durable_are_generated_again(lost):
    """A finished rollout is lost when its engine dies before the store has fetched it."""
    engines = [FakeEngine(0), FakeEngine(1)]
    recorder = Recorder(engines, lost=lost)
    await recorder.coordinator.start()
    outcome = await asyncio.wait_for(recorder.roll_out(1, REQUESTS), 20)
    assert recorder.num_deliveries > len(lost)
    assert recorder.tokens() == (await roll_out([FakeEngine(0), FakeEngine(1)]))[0]
    assert len(recorder.finished[1]) == len(REQUESTS)
    assert sum(share.num_rollouts for share in outcome.shares) == len(REQUESTS)
    assert sum(share.num_restarts for share in outcome.shares) == len(lost)
    assert not any(engine.running for engine in engines)


async def test_engine_that_loses_all_rollouts_fails_stage():
    recorder = Recorder([FakeEngine(0)], max_restarts=2, lost=range(100))
    await recorder.coordinator.start()
    with pytest.raises(EngineDied, match="engine 0 died: its rollouts were lost"):
        await asyncio.wait_for(recorder.roll_out(1, [(0, request("p", 3))]), 20)
    assert recorder.num_deliveries == 3


async def test_a_rollout_counts_when_it_is_durable():
    """Neither the stage nor a view counts a rollout before the store has it."""
    coordinator = Coordinator([FakeEngine(0), FakeEngine(1)])
    await coordinator.start()
    await coordinator.load_weights(weights())
    durable, seen = 0, []

    async def keep(rollouts):
        nonlocal durable
        await asyncio.sleep(0.02)
        assert not stage.done()
        assert all(num_finished == num_durable for num_finished, num_durable in seen)
        durable += len(rollouts)

    def watch(view):
        seen.append((view.num_finished, durable))

    stage = coordinator.roll_out(REQUESTS, keep, watch)
    await asyncio.wait_for(stage, 20)
    assert durable == len(REQUESTS)
    assert {num_finished for num_finished, _ in seen} > {0}
    assert all(num_finished == num_durable for num_finished, num_durable in seen)


async def test_engine_events_are_requested_after_handling_the_last():
    """While the store is slow, the engine is not asked for more events: they do not pile up."""
    engine, ticks = FakeEngine(0), []
    coordinator = Coordinator([engine], (), 3)
    await coordinator.start()
    await coordinator.load_weights(weights())

    async def keep(_):
        ticks.append(engine.tick)
        await asyncio.sleep(0.01)
        assert engine.tick == ticks[-1]

    await asyncio.wait_for(coordinator.roll_out([(0, r) for _, r in REQUESTS], keep), 20)
    assert len(ticks) > 1
