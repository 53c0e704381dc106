"""Engines in memory that share GPUs, and what the tests of pools do with them."""

import asyncio
from dataclasses import replace
from itertools import groupby

from engines.simulate.clock import run_virtual
from schemas.layout import Pool
from tests.rollout.fakes import FakeEngine, Recorder, request, token_at

POOL = Pool(0, {1: (0, 1, 2, 3), 2: (4, 5), 4: (6,)})
"""Engine 7 is in none."""
LONG, SHORT = 40, 4
BASE = frozenset({0, 1, 2, 3})


def fleet(pools=(POOL,), **options):
    """The engines of the pools, and one more. `options`: of each."""
    degrees = {i: tp for pool in pools for tp, own in pool.engines.items() for i in own}
    engines = [FakeEngine(i, tp_degree=degrees.get(i, 1), **options) for i in range(len(degrees))]
    for pool in pools:
        own = [engines[i] for layout in pool.engines.values() for i in layout]
        for engine in own:
            engine.on_same_gpus = [e for e in own if e.tp_degree != engine.tp_degree]
    return [*engines, FakeEngine(len(engines), **options)]


def finish_late(engine, telling_s):
    """What it is asked to give back has just finished, which it tells after a while."""
    engine.late = True

    async def next_events():
        events = await FakeEngine.next_events(engine)
        await asyncio.sleep(telling_s if events.finished else 0)
        return events

    engine.next_events = next_events


def on(engine, name, num_tokens, step=1, drafting=None):
    return engine, replace(request(name, num_tokens, step=step), drafting=drafting)


TAIL = [on(i, f"p{i}", n) for i, n in enumerate([LONG, 60, SHORT, 30])]


def roll_out(engines, works, policies=(), kill=(), min_rollouts=None, pools=(POOL,), **options):
    """Stages queued one after the other, with deaths that are set once the engines are up."""

    async def run():
        recorder = Recorder(engines, pools=pools, **options)
        await recorder.coordinator.start()
        for index, method in kill:
            engines[index].dies_in = method
        outcomes = await recorder.roll_out_all(works, policies, min_rollouts)
        await asyncio.sleep(0.2)
        return recorder, outcomes

    return run_virtual(run())


def assert_once(recorder, works, engines):
    """Each request finished once, with the tokens that it has without a move, and is gone."""
    finished = recorder.finished_once(works)
    for r in finished:
        versions = [
            span.policy_version for span in r.generated.spans for _ in range(span.num_tokens)
        ]
        assert set(versions) <= {r.request.origin_step - 1, r.request.id.step - 1}
        assert len(versions) == r.request.max_response_tokens
        tokens = [token_at(r.request, i, version) for i, version in enumerate(versions)]
        assert r.generated.token_ids == tokens
    assert not any(engine.running for engine in engines)


def assert_well(recorder, works, engines):
    """`assert_once`, in the base layout of POOL."""
    assert_once(recorder, works, engines)
    assert [e.index for e in engines if e.parked] == [4, 5, 6]


class At:
    """These moves, each once, when so many seconds of the stage are over. Keeps what it saw."""

    def __init__(self, *moves):
        self.moves, self.views = list(moves), []

    def decide(self, view):
        self.views.append(view)
        due = [move for at_s, move in self.moves if view.elapsed_s >= at_s]
        self.moves = [(at_s, move) for at_s, move in self.moves if view.elapsed_s < at_s]
        return due

    def working(self):
        """Engines of the pool that were seen together, in turn."""
        seen = (frozenset(e.engine for e in view.engines if e.engine < 7) for view in self.views)
        return [engines for engines, _ in groupby(seen)]


def submitted(engines, name):
    return [(e.index, r) for e in engines for r in e.submitted if r.id.prompt_key == name]
