"""Engines die before or during a switch of their pool: no request is lost or finishes twice."""

import asyncio

import pytest

from refrain.engines.rollout.interface import EngineDied
from refrain.engines.rollout.moves import Reshape
from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.timeline import Activity
from tests.rollout.fakes import FakeEngine, Recorder
from tests.rollout.pools import (
    BASE,
    LONG,
    POOL,
    SHORT,
    TAIL,
    At,
    assert_well,
    fleet,
    on,
    roll_out,
)

METHODS = [
    "precopy",
    "expect_kv",
    "withdraw",
    "park",
    "wake",
    "load_weights",
    "submit",
    "next_events",
]


@pytest.mark.parametrize("method", [*METHODS, "take_drafting_counts"])
@pytest.mark.parametrize("dying", [0, 2, 4, 6])
def test_a_death_in_the_middle_of_a_switch_loses_and_doubles_nothing(dying, method):
    engines = fleet(wake_s=0.003, sync_s=0.001)
    policy = At(*((0.01 * i, Reshape(0, tp)) for i, tp in enumerate([2, 4, 1, 2, 4, 2], 1)))
    works = [
        [on(0, "p0", 90), *(on(i, f"p{i}", 60 + i) for i in (1, 2, 3, 7))],
        [on(i, f"q{i}", LONG, 2) for i in (0, 1, 2, 3, 7)],
    ]
    recorder, _ = roll_out(engines, works, [policy], kill=[(dying, method)])
    assert_well(recorder, works, engines)
    assert engines[dying].num_starts == 2


def test_a_death_takes_a_raised_pool_back():
    """Requests of the dead engine resume from their state before the switch. Those of the other
    engine keep their progress."""
    engines, policy = fleet(), At((0.010, Reshape(0, 2)))
    engines[4].die_at_tick = 20
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert policy.working()[:3] == [BASE, {4, 5}, BASE]
    assert outcome.shares[4].num_restarts == 1
    back = [r for engine in engines[:4] for r in engine.submitted if r.generated]
    assert {r.id.prompt_key for r in back} == {"p0", "p1", "p3"}
    of_dead = {r.id.prompt_key for r in engines[4].submitted}
    for r in back:
        num_tokens = len(r.generated.token_ids)
        assert (num_tokens, r.kv) == (11, None) if r.id.prompt_key in of_dead else num_tokens > 15
        assert r.id.prompt_key in of_dead or r.kv


def test_requests_wait_for_a_base_that_is_dead_too():
    """Engines 0 to 3 die parked. Engine 6 dies before they have restarted."""
    engines, policy = fleet(), At((0.010, Reshape(0, 4)))
    for engine in engines[:4]:
        engine.die_at_tick = 20
    engines[6].die_at_tick = 20

    async def late_start(engine):
        await asyncio.sleep(0.05 if engine.num_starts else 0)
        await FakeEngine.start(engine)

    for engine in engines[:4]:
        engine.start = lambda engine=engine: late_start(engine)
    recorder, (outcome,) = roll_out(engines, [TAIL], [policy])
    assert_well(recorder, [TAIL], engines)
    assert [engine.num_starts for engine in engines] == [2, 2, 2, 2, 1, 1, 2, 1]
    assert outcome.finished_s > 0.065


def test_unreported_requests_of_a_dead_parked_engine_rerun():
    engines = fleet()
    engines[0].late, engines[0].die_at_tick = True, 12
    recorder, _ = roll_out(engines, [TAIL], [At((0.0095, Reshape(0, 4)))])
    assert_well(recorder, [TAIL], engines)


def test_standby_engine_that_keeps_dying_fails_next_stage():
    engines = fleet()
    engines[5].die_at_tick, engines[5].always_dies = 3, True

    async def run():
        recorder = Recorder(engines, pools=(POOL,))
        await recorder.coordinator.start()
        await recorder.roll_out(1, TAIL)
        assert engines[5].num_starts == 1, "restarted while others used its GPUs"
        for step in range(2, 9):
            await asyncio.wait_for(recorder.roll_out(step, TAIL), 20)

    with pytest.raises(EngineDied, match="engine 5 died"):
        run_virtual(run())
    assert engines[5].num_starts == 4


@pytest.mark.parametrize("parked", [[5], [4, 6]])
def test_dead_parked_engine_restarts_when_others_are_idle(parked):
    """The engines on its GPUs park meanwhile. The next stage waits until they are back."""
    engines = fleet(wake_s=0.003)
    for index in parked:
        engines[index].die_at_tick = 3
    spans = []

    async def run():
        recorder = Recorder(engines, pools=(POOL,))
        await recorder.coordinator.start()
        await recorder.roll_out(1, TAIL)
        assert {engines[index].num_starts for index in parked} == {1}
        next_one = [on(i, f"q{i}", SHORT, 2) for i in range(4)]
        await asyncio.wait_for(recorder.roll_out(2, next_one), 20)
        await asyncio.sleep(0.1)
        spans.extend(recorder.coordinator.timeline(-1.0, 20.0).spans)
        assert_well(recorder, [TAIL, next_one], engines)

    run_virtual(run())
    assert {engines[index].num_starts for index in parked} == {2}
    switches = [s for s in spans if s.engine == 0 and s.activity is Activity.SWITCH]
    assert len(switches) == 1


def test_engines_wait_for_processes_of_a_dead_one():
    """Engine 0 dies while it parks, and killing its processes takes long. Engine 6 must wait."""
    engines = fleet()
    ended_s = []

    async def slowly():
        await asyncio.sleep(0.5)
        await FakeEngine.kill(engines[0])
        ended_s.append(asyncio.get_running_loop().time())

    engines[0].kill = slowly
    works = [TAIL]
    recorder, _ = roll_out(engines, works, [At((0.010, Reshape(0, 4)))], kill=[(0, "park")])
    assert_well(recorder, works, engines)
    woken = [s for s in recorder.timeline.spans if s.engine == 6 and s.activity is Activity.SWITCH]
    assert woken[0].end_s >= ended_s[0]
