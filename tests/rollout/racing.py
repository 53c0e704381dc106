"""Helpers that run races on fake engines, and the check that every race must pass."""

from dataclasses import replace

from refrain.engines.rollout.moves import Race
from refrain.engines.simulate.clock import run_virtual
from tests.rollout.fakes import FAST, FakeEngine, MoveAt, Recorder, request

LONG, SHORT = 40, 4


def roll_out(engines, works, policies=(), min_rollouts=None, max_restarts=3, lost=(), **options):
    """Queue these stages at once and run them. Return the recorder and the outcomes."""

    async def run():
        recorder = Recorder(engines, max_restarts, lost)
        await recorder.coordinator.start()
        outcomes = await recorder.roll_out_all(works, policies, min_rollouts, **options)
        return recorder, outcomes

    return run_virtual(run())


def assert_once(recorder, works, engines):
    """Assert that each request finished once with the tokens that it has without moves, and that
    no engine still holds one."""
    finished = recorder.finished_once(works)
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
