"""Overlapping stages on fake engines: each samples with its own policy version, and no request is
lost or finishes twice."""

import asyncio
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.rollout.interface import WeightSyncError
from refrain.engines.rollout.moves import Defer, Migrate
from refrain.engines.simulate.clock import run_virtual
from tests.rollout.fakes import FakeEngine, MoveAt, Recorder, work

LONG, SHORT = 40, 4


async def run_stages(engines, works, **options):
    recorder = Recorder(engines)
    await recorder.coordinator.start()
    stages = [recorder.roll_out(step, w, **options) for step, w in enumerate(works, 1)]
    outcomes = await asyncio.wait_for(asyncio.gather(*stages), 20)
    return recorder, outcomes


async def test_an_engine_begins_the_next_stage_without_waiting():
    engines = [FakeEngine(0), FakeEngine(1)]
    recorder, outcomes = await run_stages(engines, [work(1, [SHORT, LONG]), work(2, [LONG, SHORT])])
    assert recorder.order == [1, 2]
    assert recorder.versions(1) == {0}
    assert recorder.versions(2) == {1}
    timeline = recorder.coordinator.timeline(outcomes[0].started_s, outcomes[1].finished_s)
    begun = {(s.engine, s.label): s.start_s for s in timeline.spans if s.activity == "rollout"}
    assert begun[0, "train/2"] < outcomes[0].finished_s
    assert begun[1, "train/2"] >= outcomes[0].finished_s - 0.01


async def test_overlapping_stages_have_the_tokens_of_stages_one_by_one():
    works = [work(step, [SHORT, LONG, 9, 17]) for step in (1, 2, 3)]
    together, _ = await run_stages([FakeEngine(0), FakeEngine(1)], works)
    alone = Recorder([FakeEngine(0)])
    await alone.coordinator.start()
    for step, assignments in enumerate(works, 1):
        await asyncio.wait_for(alone.roll_out(step, [(0, r) for _, r in assignments]), 20)
    assert together.tokens() == alone.tokens()


async def test_deferred_request_continues_in_the_next_stage():
    recorder = Recorder([FakeEngine(0), FakeEngine(1)])
    await recorder.coordinator.start()
    policy = MoveAt("p1", 10, lambda id: Defer(id, 0))
    first = recorder.roll_out(1, work(1, [SHORT, LONG]), policies=[policy], min_rollouts=1)
    second = recorder.roll_out(2, work(2, [LONG, SHORT]), policies=[policy], min_rollouts=0)
    one, two = await asyncio.wait_for(asyncio.gather(first, second), 20)
    assert [r.request.id.prompt_key for r in recorder.finished[1]] == ["p0"]
    (moved,) = [r for r in recorder.finished[2] if r.request.deferred_from == 1]
    assert (moved.request.id.step, moved.request.id.sample_index) == (2, -1)
    assert len(moved.generated.token_ids) == LONG
    assert [s.policy_version for s in moved.generated.spans] == [0, 1]
    assert [id.prompt_key for id in one.deferred] == ["p1"]
    assert two.carried == (moved.request.id,)
    assert len(recorder.finished[2]) == 3
    assert one.finished_s < two.finished_s


async def test_a_deferred_request_starts_first():
    """A deferred request is the longest one of the stage."""
    engines = [FakeEngine(0), FakeEngine(1)]
    recorder = Recorder(engines)
    await recorder.coordinator.start()
    policy = MoveAt("p1", 10, lambda id: Defer(id, 1))
    first = recorder.roll_out(1, work(1, [SHORT, LONG]), policies=[policy], min_rollouts=1)
    second = recorder.roll_out(2, work(2, [LONG, SHORT]), min_rollouts=0)
    await asyncio.wait_for(asyncio.gather(first, second), 20)
    assert [request.deferred_from for request in engines[1].submitted] == [None, 1, None]


async def test_requests_that_come_from_another_step_do_not_make_room_to_defer_more():
    """Otherwise ever more requests would be a step late."""
    recorder = Recorder([FakeEngine(0), FakeEngine(1)])
    await recorder.coordinator.start()

    class Everything:
        def decide(self, view):
            return [Defer(id, e.engine) for e in view.engines for id in e.progress]

    stages = [
        recorder.roll_out(step, work(step, [LONG] * 4), policies=[Everything()], min_rollouts=3)
        for step in (1, 2, 3, 4)
    ]
    outcomes = await asyncio.wait_for(asyncio.gather(*stages), 20)
    assert [len(outcome.deferred) for outcome in outcomes] == [1, 1, 1, 0]
    assert [len(recorder.finished[step]) for step in (1, 2, 3, 4)] == [3, 4, 4, 5]


@pytest.mark.parametrize(
    ("min_rollouts", "min_of_next"), [(2, 0), (None, 0), (1, None)], ids=["full", "no", "next"]
)
async def test_nothing_is_deferred_beyond_the_bound(min_rollouts, min_of_next):
    """The batch would not be full, the stage does not defer, or the next stage takes none."""
    recorder = Recorder([FakeEngine(0), FakeEngine(1)])
    await recorder.coordinator.start()
    policy = MoveAt("p1", 10, lambda id: Defer(id, 0))
    first = recorder.roll_out(
        1, work(1, [SHORT, LONG]), policies=[policy], min_rollouts=min_rollouts
    )
    second = recorder.roll_out(2, work(2, [LONG, SHORT]), min_rollouts=min_of_next)
    one, _ = await asyncio.wait_for(asyncio.gather(first, second), 20)
    assert not one.deferred
    assert all(view.num_deferrable == 0 for view in policy.views)
    assert len(recorder.finished[1]) == 2


async def test_a_request_is_deferred_once():
    recorder = Recorder([FakeEngine(0), FakeEngine(1)])
    await recorder.coordinator.start()
    policy = MoveAt("p1", 10, lambda id: Defer(id, 1))
    stages = [
        recorder.roll_out(step, work(step, [LONG, LONG]), policies=[policy], min_rollouts=0)
        for step in (1, 2, 3)
    ]
    await asyncio.wait_for(asyncio.gather(*stages), 20)
    deferred = [
        r.request for rs in recorder.finished.values() for r in rs if r.request.deferred_from
    ]
    assert {r.deferred_from: r.id.step for r in deferred} == {1: 2, 2: 3}


async def test_a_request_migrates_only_to_an_engine_of_its_stage():
    """Engine 0 already has the weights of the next stage, so the request stays on engine 1."""
    recorder = Recorder([FakeEngine(0), FakeEngine(1)])
    await recorder.coordinator.start()
    policy = MoveAt("p1", 20, lambda id: Migrate(id, 0))
    first = recorder.roll_out(1, work(1, [SHORT, LONG]), policies=[policy])
    second = recorder.roll_out(2, work(2, [LONG, SHORT]))
    one, _ = await asyncio.wait_for(asyncio.gather(first, second), 20)
    assert one.moves.num_migrated == 0
    assert recorder.versions(1) == {0}
    assert [e.engine for e in policy.views[-1].engines] == [1]


@pytest.mark.parametrize(
    ("dying", "method"),
    [
        (1, "withdraw"),  # dies while a request leaves it
        *((dying, m) for dying in (0, 1) for m in ("submit", "load_weights", "next_events")),
    ],
)
async def test_a_death_in_the_middle_of_a_move_loses_and_doubles_nothing(dying, method):
    engines = [FakeEngine(i, dies_in=method if i == dying else None) for i in range(3)]
    recorder = Recorder(engines)
    await recorder.coordinator.start()
    migrate = MoveAt("p1", 3, lambda id: Migrate(id, 0))
    defer = MoveAt("p4", 5, lambda id: Defer(id, 0))
    lengths = [30, LONG, SHORT, 9, LONG, 12]
    stages = [
        recorder.roll_out(step, work(step, lengths, 3), policies=[migrate, defer], min_rollouts=4)
        for step in (1, 2, 3)
    ]
    await asyncio.wait_for(asyncio.gather(*stages), 20)
    names = Counter(
        (r.request.origin_step, r.request.id.prompt_key)
        for rollouts in recorder.finished.values()
        for r in rollouts
    )
    assert names == {(step, f"p{i}"): 1 for step in (1, 2, 3) for i in range(6)}
    assert engines[dying].num_starts == 2


class AnyMoves:
    def __init__(self, seed):
        self.random = Random(seed)

    def decide(self, view):
        ids = [id for engine in view.engines for id in engine.progress]
        if not ids or self.random.random() < 0.5:
            return []
        kind = self.random.choice([Migrate, Defer])
        return [kind(self.random.choice(ids), self.random.randrange(3))]


async def test_stage_of_deferred_requests_loads_its_weights():
    recorder = Recorder([FakeEngine(0), FakeEngine(1)])
    await recorder.coordinator.start()
    policy = MoveAt("p1", 10, lambda id: Defer(id, 0))
    first = recorder.roll_out(1, work(1, [SHORT, LONG]), policies=[policy], min_rollouts=1)
    second = recorder.roll_out(2, [], min_rollouts=0)
    await asyncio.wait_for(asyncio.gather(first, second), 20)
    (moved,) = recorder.finished[2]
    assert [span.policy_version for span in moved.generated.spans] == [0, 1]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.lists(st.integers(1, 25), max_size=9), min_size=1, max_size=4),
    deaths=st.lists(st.none() | st.integers(1, 20), min_size=3, max_size=3),
    spare=st.integers(0, 4),
)
def test_any_moves_and_deaths_finish_every_sample_once(seed, lengths, deaths, spare):
    engines = [FakeEngine(i, die_at_tick=tick) for i, tick in enumerate(deaths)]

    async def run():
        recorder = Recorder(engines)
        await recorder.coordinator.start()
        stages = [
            recorder.roll_out(
                step,
                work(step, of_step, 3),
                policies=[AnyMoves(seed + step)],
                min_rollouts=max(0, len(of_step) - spare),
            )
            for step, of_step in enumerate(lengths, 1)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*stages), 20)
        return recorder, outcomes

    recorder, outcomes = run_virtual(run())
    expected = {(s, f"p{i}"): n for s, ns in enumerate(lengths, 1) for i, n in enumerate(ns)}
    found = [r for rollouts in recorder.finished.values() for r in rollouts]
    assert len(found) == len(expected)
    assert recorder.order == list(range(1, len(lengths) + 1))
    for r in found:
        origin, step = r.request.origin_step, r.request.id.step
        assert len(r.generated.token_ids) == expected[origin, r.request.id.prompt_key]
        assert step - origin in (0, 1)
        versions = list(dict.fromkeys(s.policy_version for s in r.generated.spans))
        assert versions in ([step - 1], [origin - 1, step - 1])
    for step, outcome in enumerate(outcomes, 1):
        assert len(recorder.finished[step]) >= min(
            len(lengths[step - 1]), max(0, len(lengths[step - 1]) - spare)
        )
        assert len(outcome.carried) == len(outcomes[step - 2].deferred) if step > 1 else True


async def test_a_wrong_engine_fails_every_stage_under_way():
    recorder = Recorder([FakeEngine(0), FakeEngine(1, wrong=True)])
    await recorder.coordinator.start()
    stages = [recorder.roll_out(step, work(step, [SHORT, LONG])) for step in (1, 2)]
    for stage in stages:
        with pytest.raises(WeightSyncError, match="engine 1 differs"):
            await asyncio.wait_for(stage, 20)


async def test_a_stage_without_requests_ends_at_once():
    recorder, outcomes = await run_stages([FakeEngine(0), FakeEngine(1)], [[], work(2, [3]), []])
    assert recorder.order == [1, 2, 3]
    assert [len(outcome.shares) for outcome in outcomes] == [2, 2, 2]
    assert outcomes[0].canary_error is None


async def test_busy_and_idle_add_up_to_the_stage():
    recorder, (outcome,) = await run_stages(
        [FakeEngine(0), FakeEngine(1)], [work(1, [SHORT, LONG])]
    )
    timeline = recorder.coordinator.timeline(outcome.started_s, outcome.finished_s)
    whole = outcome.finished_s - outcome.started_s
    for share in outcome.shares:
        assert share.busy_s + timeline.idle_s(share.engine) == pytest.approx(whole, abs=0.02)
    assert timeline.idle_s(0) > 0.5 * whole > timeline.idle_s(1)
