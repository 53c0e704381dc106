"""Requests that wait in a stage's queue until a policy starts them."""

import asyncio
from types import SimpleNamespace

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.moves import Start
from refrain.engines.rollout.tracked_engine import TrackedEngine
from tests.rollout.fakes import FakeEngine, request, weights


class OneAtATime:
    """Gives each empty engine the last waiting request."""

    def __init__(self):
        self.views = []

    def decide(self, view):
        self.views.append((len(view.waiting), dict(view.finished), view.goes_on))
        empty = [engine.engine for engine in view.engines if not engine.progress]
        waiting = list(reversed(view.waiting))
        return [Start(id, engine) for id, engine in zip(waiting, empty, strict=False)]


async def roll_out(engines, steps, policies):
    """Queue the steps at once. Return the rollouts of each."""
    coordinator = Coordinator(engines)
    await coordinator.start()
    rollouts, stages = [], []
    for version, requests in enumerate(steps):
        found = []

        async def note(finished, found=found):
            found += finished

        placed = [(None, one) for one in requests]
        stages.append(
            coordinator.roll_out(placed, note, weights=weights(version), policies=policies)
        )
        rollouts.append(found)
    await asyncio.wait_for(asyncio.gather(*stages), 10)
    await coordinator.shutdown()
    return rollouts


def run(engines, steps, policies):
    return asyncio.run(roll_out(engines, steps, policies))


def names(rollouts):
    return sorted(rollout.request.id.prompt_key for rollout in rollouts)


def test_policies_start_waiting_requests():
    policy, engines = OneAtATime(), [FakeEngine(0), FakeEngine(1)]
    (found,) = run(engines, [[request(name, 5) for name in "abcde"]], [policy])
    assert names(found) == list("abcde")
    first = [engine.submitted[0].id.prompt_key for engine in engines]
    assert sorted(first) == ["d", "e"]
    assert policy.views[0][0] == 5
    assert any(len(finished) == 4 for _, finished, _ in policy.views)


def test_a_stage_ends_without_a_policy():
    (found,) = run([FakeEngine(0), FakeEngine(1)], [[request(name, 3) for name in "abc"]], [])
    assert names(found) == list("abc")


def test_engines_begin_the_next_stage_when_nothing_waits():
    """All requests of a stage run with its version."""
    policy = OneAtATime()
    steps = [[request(name, 4, step=step) for name in "abc"] for step in (1, 2)]
    found = run([FakeEngine(0), FakeEngine(1)], steps, [policy])
    for version, rollouts in enumerate(found):
        assert names(rollouts) == list("abc")
        spans = {span.policy_version for r in rollouts for span in r.generated.spans}
        assert spans == {version}
    assert {goes_on for _, _, goes_on in policy.views} == {True, False}


def test_waiting_requests_survive_a_death():
    engines = [FakeEngine(0, die_at_tick=2), FakeEngine(1)]
    (found,) = run(engines, [[request(name, 6) for name in "abcdef"]], [OneAtATime()])
    assert names(found) == list("abcdef")


def test_an_engine_stays_while_requests_of_its_stage_wait():
    tracked = TrackedEngine(FakeEngine(0))
    tracked.stage = SimpleNamespace(waiting={"a": request("a", 1)}, in_flight=False)
    assert not tracked.free
    tracked.stage.waiting.clear()
    assert tracked.free
