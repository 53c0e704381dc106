"""Races over engines in memory: how tests run them, and what must hold of all."""

import asyncio
from collections import Counter
from dataclasses import replace

from engines.rollout.moves import Race
from engines.simulate.clock import run_virtual
from tests.rollout.fakes import FAST, FakeEngine, MoveAt, Recorder, request

LONG, SHORT = 40, 4


def roll_out(engines, works, policies=(), min_rollouts=None, max_restarts=3, lost=()):
    """Stages queued one after the other: what finished, and each one's outcome."""

    async def run():
        recorder = Recorder(engines, max_restarts, lost)
        await recorder.coordinator.start()
        stages = [
            recorder.roll_out(step, own, policies=policies, min_rollouts=min_rollouts)
            for step, own in enumerate(works, 1)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*stages), 20)
        recorder.timeline = recorder.coordinator.timeline(-1.0, 20.0)
        return recorder, outcomes

    return run_virtual(run())


def assert_once(recorder, works, engines):
    """Each request finished once with the tokens that it has without any move, and is gone."""
    finished = [r for rollouts in recorder.finished.values() for r in rollouts]
    assert Counter((r.request.origin_step, r.request.id.prompt_key) for r in finished) == {
        (step, r.id.prompt_key): 1 for step, own in enumerate(works, 1) for _, r in own
    }
    alone, _ = roll_out([FakeEngine(0)], [[(0, r) for _, r in own] for own in works])
    unmoved = [r for r in finished if r.request.deferred_from is None]
    assert {r.request.id: tuple(r.generated.token_ids) for r in unmoved}.items() <= (
        alone.tokens().items()
    )
    assert not any(engine.running for engine in engines)


def race_at(num_tokens, *targets, drafting=FAST, prompt="p0"):
    return [MoveAt(prompt, num_tokens, lambda id, e=e: Race(id, e, drafting)) for e in targets]


def drafted(name, num_tokens, drafting):
    return replace(request(name, num_tokens), drafting=drafting)
