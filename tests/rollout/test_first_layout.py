"""A stage may begin in another layout than the last one: each request still finishes once with the
same tokens, and a pool that is already in the layout does not switch again."""

import asyncio
from dataclasses import replace

import pytest

from refrain.engines.rollout.moves import Reshape
from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.layout import Pool
from tests.rollout.fakes import Recorder
from tests.rollout.pools import (
    LONG,
    POOL,
    SHORT,
    At,
    assert_once,
    fleet,
    on,
    roll_out,
    submitted,
)

FIRST = [on(i, f"p{i}", LONG) for i in range(8)]
LAYOUTS = {1: {0, 1, 2, 3}, 2: {4, 5}, 4: {6}}


class BeginIn:
    """Begins stage after stage in the next of these layouts. Afterwards it keeps the layout."""

    def __init__(self, *tp_degrees, moves=()):
        self.tp_degrees, self.asked, self.at = list(tp_degrees), [], At(*moves)

    def begin(self, view):
        self.asked.append(view)
        return [Reshape(0, self.tp_degrees.pop(0))] if self.tp_degrees else []

    def decide(self, view):
        return self.at.decide(view)


def in_turn(engines, works, policy, **options):
    """Run each stage after the last one has ended. Return the recorder and the outcomes."""

    async def run():
        recorder = Recorder(engines, pools=(POOL,), **options)
        await recorder.coordinator.start()
        outcomes = []
        for step, own in enumerate(works, 1):
            stage = recorder.roll_out(step, own, policies=[policy])
            outcomes.append(await asyncio.wait_for(stage, 20))
        recorder.timeline = recorder.coordinator.timeline(-1.0, 20.0)
        await asyncio.sleep(0.2)
        return recorder, outcomes

    return run_virtual(run())


def begun_on(engines, step):
    return {e.index for e in engines for r in e.submitted if r.id.step == step} - {7}


def works_of(num):
    return [[on(i, f"p{i}", LONG, step) for i in range(8)] for step in range(1, num + 1)]


@pytest.mark.parametrize("tp_degree", LAYOUTS)
def test_a_stage_begins_in_each_layout(tp_degree):
    engines = fleet(wake_s=0.002, sync_s=0.001)
    recorder, (outcome,) = in_turn(engines, [FIRST], BeginIn(tp_degree))
    assert_once(recorder, [FIRST], engines)
    assert begun_on(engines, 1) == LAYOUTS[tp_degree]
    assert (outcome.moves.num_switches, recorder.timeline.moves) == (0, ())
    parked = {e.index for e in engines if e.parked}
    assert parked == set(range(7)) - LAYOUTS[tp_degree]


def test_prompts_that_were_dealt_in_turn_stay_so():
    """Requests planned for engines 0 and 2 go to engine 4, the others to engine 5: the deal that
    two engines would have had."""
    engines = fleet()
    in_turn(engines, [FIRST[:4]], BeginIn(2))
    assert [submitted(engines, f"p{i}")[0][0] for i in range(4)] == [4, 5, 4, 5]


@pytest.mark.parametrize("degrees", [(4, 1), (1, 1)])
def test_samples_of_a_prompt_stay_together(degrees):
    """Requests planned for engine 6 go to engines 0 to 3, whether engine 6 was serving or not."""
    engines = fleet()
    names = [(f"p{i}", sample) for i in range(4) for sample in range(2)]
    work = [on(6, name, LONG) for name, _ in names]
    work = [
        (6, replace(request, id=replace(request.id, sample_index=sample)))
        for (_, request), (_, sample) in zip(work, names, strict=True)
    ]
    in_turn(engines, [work, work_of(2, work)], BeginIn(*degrees))
    for i in range(4):
        of_prompt = [
            e.index
            for e in engines
            for r in e.submitted
            if (r.id.prompt_key, r.id.step) == (f"p{i}", 2)
        ]
        assert of_prompt == [i, i]


def work_of(step, work):
    return [(engine, replace(r, id=replace(r.id, step=step))) for engine, r in work]


def test_where_it_began_the_next_stage_begins_at_no_cost():
    engines, policy = fleet(wake_s=0.002), BeginIn(4, 4)
    recorder, _ = in_turn(engines, works := works_of(2), policy)
    assert_once(recorder, works, engines)
    assert (begun_on(engines, 1), begun_on(engines, 2)) == ({6}, {6})
    assert engines[6].calls.count("wake") == 1
    assert [{e.engine for e in view.engines} for view in policy.asked] == [{0, 1, 2, 3, 7}, {6, 7}]


@pytest.mark.parametrize("degrees", [(4, 1, 2), (2, 4, 1), (4, 2, 1)])
def test_from_any_layout_to_any_other(degrees):
    """Plans name engines of the last layout. The coordinator maps them to the new one."""
    engines = fleet(wake_s=0.002, sync_s=0.001)
    recorder, _ = in_turn(engines, works := works_of(3), BeginIn(*degrees))
    assert_once(recorder, works, engines)
    for step, degree in enumerate(degrees, 1):
        assert begun_on(engines, step) == LAYOUTS[degree]


def test_a_plan_of_a_layout_that_is_no_more_is_spread():
    engines = fleet()
    work = [on(6, f"p{i}", LONG) for i in range(4)] + [on(5, "q", SHORT)]
    recorder, _ = in_turn(engines, [work], BeginIn())
    assert_once(recorder, [work], engines)
    assert [submitted(engines, f"p{i}")[0][0] for i in range(4)] == [0, 1, 2, 3]
    assert submitted(engines, "q")[0][0] == 1


def test_pool_switches_from_its_first_layout_and_returns():
    engines = fleet(wake_s=0.002)
    policy = BeginIn(2, moves=[(0.02, Reshape(0, 4))])
    recorder, outcomes = in_turn(engines, works := works_of(2), policy)
    assert_once(recorder, works, engines)
    assert begun_on(engines, 1) == {4, 5, 6}
    assert begun_on(engines, 2) == {4, 5}
    assert [outcome.moves.num_switches for outcome in outcomes] == [1, 0]


def test_no_layout_changes_while_another_stage_is_under_way():
    engines, policy = fleet(), BeginIn(2, 2, 2)
    works = works_of(2)
    recorder, _ = roll_out(engines, works, [policy])
    assert_once(recorder, works, engines)
    assert begun_on(engines, 1) == begun_on(engines, 2) == LAYOUTS[1]


def test_impossible_first_layouts_are_ignored():
    """There is no layout of TP degree 3, and no pool 5."""
    for move in (Reshape(0, 3), Reshape(5, 2)):
        engines, policy = fleet(), BeginIn()
        policy.begin = lambda _, move=move: [move]
        recorder, _ = in_turn(engines, [FIRST], policy)
        assert_once(recorder, [FIRST], engines)
        assert begun_on(engines, 1) == LAYOUTS[1]


def test_each_pool_begins_in_its_chosen_layout():
    other = Pool(1, {1: (7, 8), 2: (9,)})
    engines = fleet(pools=(POOL, other))
    work = [on(i, f"p{i}", LONG) for i in (0, 1, 2, 3, 7, 8)]
    policy = BeginIn()
    policy.begin = lambda _: [Reshape(1, 2)]
    recorder, _ = roll_out(engines, [work], [policy], pools=(POOL, other))
    assert_once(recorder, [work], engines)
    assert begun_on(engines, 1) | {7} == {0, 1, 2, 3, 9, 7}
    assert not engines[7].submitted


METHODS = ["park", "wake", "load_weights", "submit", "next_events", "take_drafting_counts"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dying", [0, 4, 6])
def test_a_death_at_a_beginning_loses_and_doubles_nothing(dying, method):
    engines = fleet(wake_s=0.003, sync_s=0.001)
    works = works_of(4)

    async def run():
        recorder = Recorder(engines, pools=(POOL,))
        await recorder.coordinator.start()
        engines[dying].dies_in = method
        policy = BeginIn(2, 4, 1, 4)
        for step, own in enumerate(works, 1):
            await asyncio.wait_for(recorder.roll_out(step, own, policies=[policy]), 20)
        await asyncio.sleep(0.2)
        return recorder

    recorder = run_virtual(run())
    assert_once(recorder, works, engines)
    assert engines[dying].num_starts == 2


def test_after_the_trainer_come_those_that_stages_begin_on():
    engines = fleet(wake_s=0.001)

    async def run():
        recorder = Recorder(engines, pools=(POOL,), keep_parked_current=False)
        await recorder.coordinator.start()
        policy = BeginIn(4, 4)
        for step, own in enumerate(works, 1):
            await asyncio.wait_for(recorder.roll_out(step, own, policies=[policy]), 20)
            await recorder.coordinator.leave_gpus()
            assert all(engine.parked for engine in engines)
            await recorder.coordinator.enter_gpus()
        return recorder

    works = works_of(2)
    recorder = run_virtual(run())
    assert_once(recorder, works, engines)
    assert [engine.index for engine in engines if not engine.parked] == [6, 7]
    assert engines[0].calls.count("wake") == 0
