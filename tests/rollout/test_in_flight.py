"""Engines that begin a stage with requests of the stage before, which go on with its weights."""

import asyncio
from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.rollout.moves import Close, Concede, Defer, Migrate, Race, Start
from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.rollout import RolloutRequest
from tests.rollout.fakes import FAST, FakeEngine, Recorder, request, token_at

NUM_ENGINES = 3


class Lost(FakeEngine):
    """Has no place to restart once it has died."""

    def die(self) -> None:
        super().die()
        self.has_place = False


class Taking:
    """Starts waiting requests on any engine, and makes random other moves."""

    def __init__(self, seed: int, kinds=(Migrate, Race, Concede, Defer)) -> None:
        self.random, self.kinds = Random(seed), kinds
        self.num_earlier = 0

    def decide(self, view):
        self.num_earlier += sum(len(engine.earlier) for engine in view.engines)
        engines = [engine.engine for engine in view.engines]
        waiting = [id for id in view.waiting if self.random.random() < 0.3]
        moves = [Start(id, self.random.choice(engines)) for id in waiting if engines]
        ids = [id for engine in view.engines for id in [*engine.progress, *engine.earlier]]
        for id in ids:
            if self.kinds and self.random.random() < 0.1:
                kind, engine = self.random.choice(self.kinds), self.random.randrange(NUM_ENGINES)
                moves.append(kind(id, engine, FAST) if kind is Race else kind(id, engine))
        if self.kinds and self.random.random() < 0.1:
            moves.append(Close())
        return moves


class OneEach:
    """Gives the n-th waiting request to engine n."""

    def decide(self, view):
        engines = [engine.engine for engine in view.engines]
        if len(view.waiting) < NUM_ENGINES or len(engines) < NUM_ENGINES:
            return []
        return [Start(id, engine) for id, engine in zip(view.waiting, engines, strict=True)]


def roll_out(engines, works, policy, *, in_flight=True, lost=(), placed=(), deferrable=None):
    """Queue all stages at once, each with weights of its own. Return the recorder. `placed`: stages
    whose requests have engines from the start. `deferrable`: requests that a stage may defer."""
    recorder = Recorder(engines, max_restarts=20, lost=lost)

    async def run():
        await recorder.coordinator.start()
        stages = [
            recorder.roll_out(
                step,
                [
                    (at % NUM_ENGINES if step in placed else None, r)
                    for at, r in enumerate(requests)
                ],
                policies=[policy],
                in_flight=in_flight and step not in placed,
                min_rollouts=None if deferrable is None else max(0, len(requests) - deferrable),
            )
            for step, requests in works.items()
        ]
        await asyncio.wait_for(asyncio.gather(*stages), 100)
        await recorder.coordinator.shutdown()

    run_virtual(run())
    return recorder


def works_of(lengths: list[list[int]]) -> dict[int, list[RolloutRequest]]:
    return {
        step: [request(f"p{i}", n, step=step) for i, n in enumerate(own)]
        for step, own in enumerate(lengths, 1)
    }


def check(recorder, works):
    """Assert that each sample finished once, with the tokens of its spans' versions. None of these
    is older than its stage's or goes back."""
    drawn = Counter(r.id for requests in works.values() for r in requests)
    assert drawn == Counter(r.request.origin for own in recorder.finished.values() for r in own)
    for in_step, found in recorder.finished.items():
        for rollout in found:
            step = rollout.request.origin_step
            assert in_step == rollout.request.id.step <= step + 1
            spans = rollout.generated.spans
            versions = [span.policy_version for span in spans for _ in range(span.num_tokens)]
            assert len(versions) == rollout.request.max_response_tokens
            assert step - 1 <= versions[0]
            assert versions[-1] < len(works)
            assert all(before <= after for before, after in pairwise(versions))
            assert list(rollout.generated.token_ids) == [
                token_at(rollout.request, at, version) for at, version in enumerate(versions)
            ]


def versions_of(rollout):
    return [span.policy_version for span in rollout.generated.spans]


def test_a_long_sample_goes_on_with_the_next_weights():
    """Its engine begins the next stage beside it, and its tokens say which weights made them."""
    works = works_of([[40, 3, 3], [5, 5, 5]])
    policy = Taking(0, kinds=())
    recorder = roll_out([FakeEngine(i) for i in range(NUM_ENGINES)], works, policy)
    check(recorder, works)
    (long,) = (r for r in recorder.finished[1] if r.request.max_response_tokens == 40)
    assert versions_of(long) == [0, 1]
    assert policy.num_earlier, "the next stage's policy sees it"


@pytest.mark.parametrize("placed", [(1, 2), (2,), (1,)])
def test_engines_finish_their_part_unless_both_stages_are_in_flight(placed):
    works = works_of([[40, 3, 3], [5, 5, 5]])
    engines = [FakeEngine(i) for i in range(NUM_ENGINES)]
    recorder = roll_out(engines, works, Taking(0, kinds=()), placed=placed)
    check(recorder, works)
    assert {tuple(versions_of(r)) for r in recorder.finished[1]} == {(0,)}


def test_engines_ahead_take_the_requests_of_one_that_is_gone():
    """They do not go back to its stage and its weights."""
    works = works_of([[4, 3, 3], [50, 50, 50]])
    late = Lost(0, dies_in="after", sync_s=0.02)
    recorder = roll_out([late, FakeEngine(1), FakeEngine(2)], works, OneEach())
    check(recorder, works)
    (left,) = (r for r in recorder.finished[1] if r.request.max_response_tokens == 4)
    assert versions_of(left) == [1]


def test_engines_go_back_to_a_stage_that_is_not_in_flight():
    """A validation has the version that it measures."""
    works = works_of([[4, 3, 3], [50, 50, 50]])
    late = Lost(0, dies_in="after", sync_s=0.02)
    recorder = roll_out([late, FakeEngine(1), FakeEngine(2)], works, OneEach(), placed=(1,))
    check(recorder, works)
    assert {tuple(versions_of(r)) for r in recorder.finished[1]} == {(0,)}


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    lengths=st.lists(st.lists(st.integers(1, 25), max_size=9), min_size=1, max_size=4),
    deaths=st.lists(st.none() | st.integers(1, 25), min_size=3, max_size=3),
    dies_in=st.none()
    | st.sampled_from(["copy", "withdraw", "submit", "next_events", "load_weights"]),
    late=st.booleans(),
    lost=st.sets(st.integers(0, 20), max_size=3),
    gone=st.none() | st.integers(0, 2),
    placed=st.sets(st.integers(1, 4), max_size=2),
    in_flight=st.booleans(),
    deferrable=st.none() | st.integers(0, 4),
)
def test_any_moves_and_deaths_finish_every_sample_once(
    seed, lengths, deaths, dies_in, late, lost, gone, placed, in_flight, deferrable
):
    engines = [
        (Lost if i == gone else FakeEngine)(i, die_at_tick=tick, late=late)
        for i, tick in enumerate(deaths)
    ]
    engines[seed % 3].dies_in = dies_in
    works = works_of(lengths)
    options = {"lost": lost, "placed": placed, "in_flight": in_flight, "deferrable": deferrable}
    recorder = roll_out(engines, works, Taking(seed), **options)
    check(recorder, works)
    for step, requests in works.items():
        least = len(requests) - (deferrable or 0)
        assert len(recorder.finished[step]) >= least


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_stage_closes_when_its_batch_is_full(in_flight):
    """What is unfinished then goes on in the next stage, on the same engine."""
    works = works_of([[40, 3, 3], [5, 5, 5]])

    class Closing(Taking):
        def decide(self, view):
            num_unfinished = view.num_rollouts - view.num_finished
            full = not view.waiting and 0 < num_unfinished <= view.num_deferrable
            return [Close()] if full else super().decide(view)

    engines = [FakeEngine(i) for i in range(NUM_ENGINES)]
    recorder = roll_out(engines, works, Closing(0, kinds=()), in_flight=in_flight, deferrable=1)
    check(recorder, works)
    assert recorder.order[0] == 1
    assert len(recorder.finished[1]) == 2
    (long,) = (r for r in recorder.finished[2] if r.request.deferred_from == 1)
    assert sorted(set(versions_of(long))) == [0, 1]
    submitted = [(e.index, r.max_response_tokens) for e in engines for r in e.submitted]
    assert {engine for engine, num_tokens in submitted if num_tokens == 40} == {long.engine}
