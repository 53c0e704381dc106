"""A tracked engine makes every transition of its lifecycle diagram, and refuses all others."""

from dataclasses import replace

import pytest

from refrain.engines.rollout.interface import EngineEvents
from refrain.engines.rollout.lifecycle import Lifecycle
from refrain.engines.rollout.reshape import _context_tokens
from refrain.engines.rollout.tracked_engine import TrackedEngine, num_response_tokens
from refrain.engines.simulate.clock import run_virtual
from refrain.schemas.rollout import Generated, RequestId, RolloutRequest, Split, Turn
from tests.rollout.fakes import FakeEngine

SERVING, ENTERING, STANDBY, DEAD, DEAD_ON_STANDBY, GONE = Lifecycle
ARROWS = {
    "enter": {SERVING: ENTERING, ENTERING: ENTERING},
    "serve": {ENTERING: SERVING},
    "stand_by": {SERVING: STANDBY, ENTERING: STANDBY, DEAD: DEAD_ON_STANDBY, GONE: GONE},
    "leave_standby": {STANDBY: ENTERING, DEAD_ON_STANDBY: DEAD, GONE: GONE},
    "die": {SERVING: DEAD, ENTERING: DEAD, STANDBY: DEAD_ON_STANDBY},
    "revive": {DEAD: SERVING, DEAD_ON_STANDBY: STANDBY},
    "lose": {DEAD: GONE, DEAD_ON_STANDBY: GONE},
}


@pytest.mark.parametrize("before", Lifecycle)
@pytest.mark.parametrize("transition", ARROWS)
def test_each_transition_is_legal_or_refused_by_name(transition, before):
    tracked = TrackedEngine(FakeEngine(7), before)

    async def go():
        getattr(tracked, transition)()

    if before in ARROWS[transition]:
        run_virtual(go())
        assert tracked.lifecycle is ARROWS[transition][before]
    else:
        with pytest.raises(AssertionError, match=f"engine 7 is {before.value}"):
            run_virtual(go())
        assert tracked.lifecycle is before


def test_a_death_leaves_the_layout_as_it_is():
    """The lifecycle holds two things: alive or dead, and on standby or not. A death changes only
    the first."""
    for before, after in ARROWS["die"].items():
        alive, dead = (TrackedEngine(FakeEngine(0), at) for at in (before, after))
        assert (alive.alive, dead.alive) == (True, False)
        assert alive.standby == dead.standby
        assert not dead.takes_requests


def test_lost_engine_is_unusable():
    gone = TrackedEngine(FakeEngine(0), GONE)
    assert (gone.gone, gone.alive, gone.takes_requests, gone.standby) == (True, False, False, False)
    assert not gone.free


def test_progress_counts_sampled_tokens_and_the_context_all_tokens():
    generated = Generated(range(9), [], (), turns=(Turn(2, 3),))
    id = RequestId(Split.TRAIN, 1, "a", 0)
    request = RolloutRequest(id, (1, 2), 0, 100, generated=generated)
    tracked = TrackedEngine(FakeEngine(0), SERVING)
    assert num_response_tokens(request) == 6
    assert _context_tokens((tracked, request)) == 11
    assert _context_tokens((tracked, replace(request, generated=None))) == 2


def test_the_count_of_a_conversation_that_begins_anew_falls():
    id = RequestId(Split.TRAIN, 1, "a", 0)
    request = RolloutRequest(id, (1, 2), 0, 100, generated=Generated(range(9), [], ()))
    tracked = TrackedEngine(FakeEngine(0), SERVING)
    tracked.unfinished[id] = request
    counts = []
    for reported in ({}, {id: 12}, {id: 3}):
        tracked.update_progress(EngineEvents((), reported))
        counts.append(tracked.num_tokens(id))
    assert counts == [9, 12, 3]
