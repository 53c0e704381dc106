"""A tracked engine makes every transition of its lifecycle diagram, and refuses all others."""

import pytest

from engines.rollout.tracked_engine import Lifecycle, TrackedEngine
from engines.simulate.clock import run_virtual
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
