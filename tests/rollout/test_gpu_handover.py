"""Engines release their GPUs to the trainer between stages. Whichever engine dies, in any call, no
engine holds memory while the trainer works, and every request finishes once with its tokens."""

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.layout import Pool
from refrain.schemas.timeline import Activity
from tests.rollout.fakes import Recorder
from tests.rollout.pools import assert_once, fleet, on
from tests.rollout.test_reshape_property import METHODS, AnyMoves

POOLS = (Pool(0, {1: (0, 1), 2: (2,)}),)
BEGIN = [0, 1, 3]
TRAINING_S = 0.5


def has_memory(engine):
    return engine.holds_memory or (engine.dies_in != "dead" and engine.version is not None)


def in_turn(engines, works, kill=(), policies=(), **options):
    """Run the stages one by one, with a turn of the trainer before each. `kill`: (turn, engine,
    method)."""

    async def run():
        recorder = Recorder(engines, pools=POOLS, **options)
        coordinator = recorder.coordinator
        await coordinator.start()
        outcomes = []
        for step, own in enumerate(works, 1):
            await coordinator.leave_gpus()
            assert not [e.index for e in engines if has_memory(e)], "engines hold GPU memory"
            for at, index, method in kill:
                if at == step and engines[index].dies_in != "dead":
                    engines[index].dies_in = method
            await asyncio.sleep(TRAINING_S)
            await coordinator.enter_gpus()
            stage = recorder.roll_out(step, own, policies=policies)
            outcomes.append(await asyncio.wait_for(stage, 20))
        recorder.timeline = coordinator.timeline(-1.0, 60.0)
        return recorder, outcomes

    return run_virtual(run())


def works_of(lengths, random):
    return [
        [on(random.choice(BEGIN), f"p{i}", n, step) for i, n in enumerate(own)]
        for step, own in enumerate(lengths, 1)
    ]


lengths = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=8), min_size=2, max_size=4)
deaths = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 3), st.sampled_from([*METHODS, "sleep", "dead"])),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=lengths,
    kill=deaths,
    slow_s=st.sampled_from([0.0, 0.01]),
    loses=st.booleans(),
)
def test_trainer_owns_gpus_after_any_death(seed, lengths, kill, slow_s, loses):
    engines = fleet(POOLS, wake_s=slow_s, loses_weights=loses)
    works = works_of(lengths, Random(seed))
    recorder, _ = in_turn(
        engines, works, kill, [AnyMoves(seed, len(engines))], keep_parked_current=not loses
    )
    assert_once(recorder, works, engines)


def test_an_engine_that_dies_asleep_is_killed_and_started_in_its_turn():
    engines = fleet(POOLS)
    works = works_of([[5, 5, 5, 5]] * 3, Random(0))
    recorder, _ = in_turn(engines, works, [(2, 0, "dead"), (1, 3, "sleep")])
    assert_once(recorder, works, engines)
    assert [engine.num_starts for engine in engines] == [2, 1, 1, 2]


def test_training_time_on_gpus_is_not_idle():
    engines = fleet(POOLS)
    works = works_of([[5, 5, 5, 5, 5, 5]] * 2, Random(0))
    recorder, _ = in_turn(engines, works)
    timeline = recorder.timeline
    for engine in BEGIN:
        assert timeline.seconds(engine, Activity.TRAINING) == pytest.approx(2 * TRAINING_S, abs=0.1)
    assert timeline.seconds(2, Activity.TRAINING) == 0.0


def test_weights_of_before_are_not_taken_for_there():
    engines = fleet(POOLS)

    async def run():
        recorder = Recorder(engines, pools=POOLS)
        await recorder.coordinator.start()
        for name in ("p", "q"):
            await recorder.roll_out(1, [on(0, name, 5)])
            await recorder.coordinator.leave_gpus()
            await recorder.coordinator.enter_gpus()

    run_virtual(run())


def test_without_a_turn_nothing_is_rolled_out():
    async def run():
        recorder = Recorder(fleet(POOLS), pools=POOLS)
        await recorder.coordinator.start()
        await recorder.coordinator.leave_gpus()
        with pytest.raises(RuntimeError, match="take the engines' turn"):
            recorder.roll_out(1, [on(0, "p", 5)])

    run_virtual(run())


def test_engines_at_work_are_not_sent_away():
    engines = fleet(POOLS)

    async def run():
        recorder = Recorder(engines, pools=POOLS)
        await recorder.coordinator.start()
        stage = recorder.roll_out(1, [on(0, "p", 5)])
        with pytest.raises(AssertionError, match="under way"):
            await recorder.coordinator.leave_gpus()
        await stage

    run_virtual(run())
