"""When a node is lost, the remaining engines finish the requests of its engines."""

import asyncio

import pytest

from refrain.engines.rollout.interface import EngineGone
from refrain.engines.rollout.moves import Defer, Reshape
from refrain.engines.simulate.clock import run_virtual
from tests.rollout import fakes
from tests.rollout.fakes import FakeEngine, MoveAt, Recorder, weights, work
from tests.rollout.pools import BASE, LONG, POOL, SHORT, TAIL, At, assert_once, fleet


class Scene:
    """Stages queued at once, on engines that lose their nodes at `lost_at_s` (engine to
    seconds)."""

    def __init__(self, works, lost_at_s, num_engines=2, **options):
        self.engines = [FakeEngine(i) for i in range(num_engines)]
        self.recorder = Recorder(self.engines)
        self.works, self.lost_at_s, self.options = works, lost_at_s, options

    def roll_out(self):
        return run_virtual(self._roll_out())

    async def _roll_out(self):
        await self.recorder.coordinator.start()
        for index, at_s in self.lost_at_s.items():
            asyncio.get_running_loop().call_later(at_s + 1e-4, self.engines[index].lose_node)
        stages = [
            self.recorder.roll_out(step, own, **self.options)
            for step, own in enumerate(self.works, 1)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*stages), 20)
        await asyncio.sleep(0.1)
        self.spans = self.recorder.coordinator.timeline(-1.0, 20.0).spans
        return outcomes


def undisturbed(works, **options):
    scene = Scene(works, {}, **options)
    scene.roll_out()
    return scene.recorder.tokens()


def test_requests_of_a_lost_engine_move_to_others():
    works = [work(1, [LONG, LONG, 9, 17])]
    scene = Scene(works, {1: 0.006})
    (outcome,) = scene.roll_out()
    assert scene.recorder.tokens() == undisturbed(works)
    assert (scene.engines[1].num_starts, scene.engines[1].num_refused) == (1, 1)
    assert [(s.num_restarts, s.gone) for s in outcome.shares] == [(0, False), (1, True)]
    assert scene.recorder.said == [
        "rollout engine 1 died: no room; going on with 1 of 2 engines",
    ]
    assert scene.recorder.coordinator.living == (0,)


def test_stages_that_were_queued_for_it_are_done_by_the_others():
    works = [work(step, [LONG, LONG, 9, 17]) for step in (1, 2, 3)]
    scene = Scene(works, {1: 0.006})
    scene.roll_out()
    assert scene.recorder.tokens() == undisturbed(works)
    assert scene.recorder.order == [1, 2, 3]
    assert [scene.recorder.versions(step) for step in (1, 2, 3)] == [{0}, {1}, {2}]
    gone = scene.recorder.coordinator._engines[1]
    assert gone.stage is None, "a lost engine keeps weights alive"
    assert not gone.waiting


def test_a_stage_that_was_planned_for_it_begins_on_the_others():
    async def run():
        engines = [FakeEngine(i) for i in range(3)]
        recorder = Recorder(engines)
        await recorder.coordinator.start()
        engines[1].lose_node()
        await asyncio.wait_for(recorder.roll_out(1, work(1, [LONG] * 6, 3)), 20)
        await asyncio.sleep(0.1)
        since_s = asyncio.get_running_loop().time()
        again = [(1, r) for _, r in work(2, [SHORT] * 4)]
        outcome = await asyncio.wait_for(recorder.roll_out(2, again), 20)
        return recorder, outcome, recorder.coordinator.timeline(since_s, outcome.finished_s)

    recorder, outcome, timeline = run_virtual(run())
    assert [(s.engine, s.num_rollouts, s.gone) for s in outcome.shares] == [
        (0, 2, False),
        (2, 2, False),
    ]
    assert timeline.engines == (0, 2), "a lost engine counts as idle"
    assert timeline.bubble_share < 0.5
    assert recorder.coordinator.living == (0, 2)


@pytest.mark.parametrize(
    ("of_next", "num"), [([SHORT], 1), ([60], 1), ([60, SHORT], 2)], ids=["idle", "busy", "heir"]
)
def test_engine_returns_to_an_earlier_stage(of_next, num):
    """Engine 0 already has the weights of the next stage when engine 1 is lost. It must return for
    the requests of engine 1."""
    works = [work(1, [SHORT, LONG]), work(2, of_next)]
    scene = Scene(works, {1: 0.020})
    one, two = scene.roll_out()
    assert scene.recorder.tokens() == undisturbed(works)
    assert (scene.recorder.versions(1), scene.recorder.versions(2)) == ({0}, {1})
    assert scene.recorder.order == [1, 2]
    assert (one.shares[0].num_rollouts, two.shares[0].num_rollouts) == (2, num)
    assert scene.engines[0].calls.count("load_weights") == 3


def test_no_engine_comes_back_for_nothing():
    """Engine 1 had no request in stage 2. So engine 0 returns to stage 1, but not to stage 2."""
    works = [work(1, [SHORT, LONG]), work(2, [SHORT]), work(3, [SHORT])]
    scene = Scene(works, {1: 0.030})
    scene.roll_out()
    assert scene.recorder.tokens() == undisturbed(works)
    versions = [s.label for s in scene.spans if s.engine == 0 and s.activity == "sync"]
    assert versions == ["train/1", "train/2", "train/3", "train/1"]


def test_returned_engine_defers_no_requests():
    """Engine 0 returned from stage 2 to stage 1. No engine has stage 2 ahead, so none can take a
    deferred request."""
    works = [work(1, [SHORT, LONG]), work(2, [SHORT, SHORT])]
    policy = MoveAt("p1", 30, lambda id: Defer(id, 0))
    scene = Scene(works, {1: 0.020}, policies=[policy], min_rollouts=0)
    one, _ = scene.roll_out()
    assert any(view.num_deferrable for view in policy.views)
    assert not one.deferred
    assert len(scene.recorder.finished[1]) == 2
    assert len(scene.recorder.finished[2]) == 2


def test_loss_of_the_last_engine_fails_all_stages():
    scene = Scene([work(1, [LONG, LONG]), work(2, [LONG, LONG])], {0: 0.006, 1: 0.012})
    recorder = scene.recorder

    async def run():
        with pytest.raises(EngineGone, match="engine 1 died: no room"):
            await scene._roll_out()
        assert recorder.coordinator.living == (0, 1), "a plan needs engines, even if none is left"
        with pytest.raises(EngineGone, match="engine 1 died: no room"):
            await recorder.roll_out(3, work(3, [SHORT]))

    run_virtual(run())
    assert recorder.said == ["rollout engine 0 died: no room; going on with 1 of 2 engines"]


def test_engine_is_lost_between_stages():
    """Loading weights finds the engine dead."""

    async def run():
        engines = [FakeEngine(i) for i in range(2)]
        recorder = Recorder(engines)
        await recorder.coordinator.start()
        engines[0].lose_node()
        for version in range(2):
            await recorder.coordinator.load_weights(weights(version))
        outcome = await asyncio.wait_for(recorder.roll_out(2, work(2, [9, 9])), 20)
        return recorder, engines, outcome

    recorder, engines, outcome = run_virtual(run())
    assert [(s.engine, s.gone) for s in outcome.shares] == [(0, True), (1, False)]
    assert recorder.coordinator.living == (1,)
    assert len(recorder.finished[2]) == 2
    assert engines[1].calls.count("load_weights") == 2


def test_next_stage_reports_engines_lost_after_the_last(monkeypatch):
    monkeypatch.setattr(fakes, "PLACE_S", 5.0)

    async def run():
        engines = [FakeEngine(i) for i in range(2)]
        recorder = Recorder(engines)
        await recorder.coordinator.start()
        asyncio.get_running_loop().call_later(0.006, engines[1].lose_node)
        first = await asyncio.wait_for(recorder.roll_out(1, work(1, [9, LONG])), 20)
        await asyncio.sleep(10.0)
        return [first, *[await recorder.roll_out(step, work(step, [9, 9])) for step in (2, 3)]]

    outcomes = run_virtual(run())
    assert [[(s.engine, s.gone) for s in outcome.shares] for outcome in outcomes] == [
        [(0, False), (1, False)],
        [(0, False), (1, True)],
        [(0, False)],
    ]


def test_lost_pool_leaves_its_requests_to_another_engine():
    """Engines 0 to 3 are parked and already known to be lost when the first serving one dies."""
    engines, policy = fleet(), At((0.010, Reshape(0, 2)))

    async def run():
        recorder = Recorder(engines, pools=(POOL,))
        await recorder.coordinator.start()
        for engine in engines[:7]:
            at_s = 0.0201 if engine.index in BASE else 0.0301 + engine.index / 1000
            asyncio.get_running_loop().call_later(at_s, engine.lose_node)
        await asyncio.wait_for(recorder.roll_out(1, TAIL, policies=[policy]), 20)
        await asyncio.sleep(0.1)
        return recorder

    recorder = run_virtual(run())
    assert_once(recorder, [TAIL], engines)
    assert frozenset({4, 5}) in policy.working()
    assert recorder.coordinator.living == (7,)
    assert len(recorder.said) == 7
