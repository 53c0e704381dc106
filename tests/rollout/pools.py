"""Fake engines that share GPUs, and helpers for the tests of pools."""

import asyncio
from dataclasses import replace
from itertools import groupby

from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.layout import Pool
from tests.rollout.fakes import FakeEngine, Recorder, request, token_at

POOL = Pool(0, {1: (0, 1, 2, 3), 2: (4, 5), 4: (6,)})
"""The fleet also has engine 7, which is in no pool."""
LONG, SHORT = 40, 4
BASE = frozenset({0, 1, 2, 3})


def fleet(pools=(POOL,), **options):
    """Return the engines of the pools and one more. `options` go to each engine."""
    degrees = {i: tp for pool in pools for tp, own in pool.engines.items() for i in own}
    engines = [FakeEngine(i, tp_degree=degrees.get(i, 1), **options) for i in range(len(degrees))]
    for pool in pools:
        own = [engines[i] for layout in pool.engines.values() for i in layout]
        for engine in own:
            engine.on_same_gpus = [e for e in own if e.tp_degree != engine.tp_degree]
    return [*engines, FakeEngine(len(engines), **options)]


def finish_late(engine, telling_s):
    """Let withdrawn requests of this engine have just finished. The engine reports finished
    requests after `telling_s`."""
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
    """Queue these stages at once and run them. `kill`: (engine, method) deaths, set after the
    engines have started. Return the recorder and the outcomes."""

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
    """Assert that each request finished once with the tokens that it has without moves, and that
    no engine still holds one."""
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
    """Assert the same as `assert_once`, and that POOL is in its base layout."""
    assert_once(recorder, works, engines)
    assert [e.index for e in engines if e.parked] == [4, 5, 6]


class At:
    """Asks once for each move, when its time of the stage has come. Keeps all views."""

    def __init__(self, *moves):
        self.moves, self.views = list(moves), []

    def decide(self, view):
        self.views.append(view)
        due = [move for at_s, move in self.moves if view.elapsed_s >= at_s]
        self.moves = [(at_s, move) for at_s, move in self.moves if view.elapsed_s < at_s]
        return due

    def working(self):
        """Return the sets of serving engines of the pool, in the order that the views had them."""
        seen = (frozenset(e.engine for e in view.engines if e.engine < 7) for view in self.views)
        return [engines for engines, _ in groupby(seen)]


def submitted(engines, name):
    return [(e.index, r) for e in engines for r in e.submitted if r.id.prompt_key == name]
