"""When an engine dies, its conversations go on after the turns that are recorded elsewhere."""

import asyncio
from dataclasses import replace

import pytest

from refrain.engines.rollout.moves import Race, Reshape
from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.environment import EnvironmentTask
from refrain.schemas.rollout import Generated, VersionSpan
from tests.rollout.fakes import FAST, FakeEngine, MoveAt, Recorder, token_at, work
from tests.rollout.pools import LONG, POOL, TAIL, At, assert_once, fleet

RECORDED = 5
"""Tokens of each conversation that are recorded when its engine dies."""
TASK = EnvironmentTask("a", "mine", None, {}, 7)


def talks(step, lengths, num_engines=2):
    """Return requests of which every second one is a conversation."""
    return [
        (engine, replace(r, task=TASK) if number // num_engines % 2 == 0 else r)
        for number, (engine, r) in enumerate(work(step, lengths, num_engines))
    ]


class Journal:
    """Returns requests with their first tokens, as an engine of a version samples them."""

    def __init__(self, version=0):
        self.version, self.asked = version, []

    async def recover(self, requests):
        self.asked += [request.id for request in requests]
        await asyncio.sleep(0.001)
        return [replace(request, generated=self._begun(request)) for request in requests]

    def _begun(self, request):
        tokens = [token_at(request, at, self.version) for at in range(RECORDED)]
        return Generated(tokens, [-1.0] * RECORDED, (VersionSpan(self.version, RECORDED),))


async def _roll_out(recorder, stages, die, at_s):
    await recorder.coordinator.start()
    asyncio.get_running_loop().call_later(at_s + 1e-4, die)
    running = [recorder.roll_out(step, own, **options) for step, (own, options) in stages.items()]
    await asyncio.wait_for(asyncio.gather(*running), 20)
    await recorder.coordinator.shutdown()


def roll_out(engines, stages, die, *, at_s=0.0105, **pools):
    recorder = Recorder(engines, **pools)
    run_virtual(_roll_out(recorder, stages, die, at_s))
    return recorder


def came_with(engine):
    """Return how many tokens each request had when it came to the engine, the last time."""
    return {
        r.id: len(r.generated.token_ids) if r.generated else 0 for r in engine.submitted if r.task
    }


@pytest.mark.parametrize("how", ["restarts", "gone", "alone"])
def test_conversations_of_a_dead_engine_go_on_after_their_recorded_turns(how):
    num_engines = 1 if how == "alone" else 2
    own, journal = talks(1, [LONG] * 8, num_engines), Journal()
    expected = roll_out([FakeEngine(0), FakeEngine(1)], {1: (own, {})}, lambda: None).tokens()
    engines = [FakeEngine(index) for index in range(num_engines)]
    dead = engines[-1]
    die = dead.lose_node if how == "gone" else dead.die
    recorder = roll_out(engines, {1: (own, {"recover": journal.recover})}, die)
    assert recorder.tokens() == expected
    theirs = [r.id for engine, r in own if engine == dead.index and r.task]
    assert sorted(map(str, journal.asked)) == sorted(map(str, theirs))
    came = came_with(engines[0])
    assert {came[id] for id in theirs} == {RECORDED}
    others = [r for engine in engines for r in engine.submitted if r.task is None]
    assert not any(r.generated for r in others)


def test_a_pool_that_retreats_brings_the_recorded_turns_along():
    own, journal = [(engine, replace(r, task=TASK)) for engine, r in TAIL], Journal()
    engines, policy = fleet(), At((0.010, Reshape(0, 2)))
    options = {"recover": journal.recover, "policies": [policy]}
    recorder = roll_out(engines, {1: (own, options)}, engines[4].die, at_s=0.02, pools=(POOL,))
    assert_once(recorder, [own], engines)
    assert frozenset({4, 5}) in policy.working()
    assert journal.asked
    for id in journal.asked:
        # It was moved with fewer tokens before.
        (*_, last) = (came for engine in engines[:4] if (came := came_with(engine).get(id)))
        assert last == RECORDED


def test_a_raced_conversation_goes_on_where_its_copy_is():
    own, journal = talks(1, [LONG, LONG]), Journal()
    options = {
        "recover": journal.recover,
        "policies": [MoveAt("p1", 3, lambda id: Race(id, 0, FAST))],
    }
    engines = [FakeEngine(0), FakeEngine(1)]
    recorder = roll_out(engines, {1: (own, options)}, engines[1].die)
    assert len(recorder.tokens()) == 2
    assert any(r.id == own[1][1].id for r in engines[0].submitted)
    assert journal.asked == []


def test_each_stage_recovers_its_own_conversations():
    """In flight, an engine has conversations of two stages."""
    journals = [Journal(0), Journal(1)]
    stages = {
        step: (
            talks(step, [LONG, LONG, 4, 4]),
            {"recover": journal.recover, "in_flight": True},
        )
        for step, journal in enumerate(journals, 1)
    }
    engines = [FakeEngine(0), FakeEngine(1)]
    roll_out(engines, stages, engines[1].die)
    for step, journal in enumerate(journals, 1):
        assert [id.step for id in journal.asked] == [step], journals
