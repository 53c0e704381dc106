"""One batch whose requests draft in different ways: how long a step takes and how many tokens it
yields."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.latency.expectation import streamed_step
from refrain.engines.simulate.batching import VirtualBatch
from refrain.engines.simulate.costs import StepCosts
from refrain.engines.simulate.member import SimulatedRequest
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest, Split
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01)
IN_TURN, AHEAD = DraftSetting("small", 4), DraftSetting("small", 4, coupled=False)
SLOW_S = 0.005
"""Seconds in which the drafter `slow` drafts one token."""


class TwoDrafters(LinearLatency):
    def draft_s(self, drafter, batch, window):
        return window * (SLOW_S if drafter == "slow" else 0.001) + 0.0 * batch


def id_of(name):
    return RequestId(Split.TRAIN, 1, name, 0)


def member(name, setting=None, acceptance=0.5, length=1000):
    request = RolloutRequest(id_of(name), (0,) * 10, 0, length + 1, drafting=setting)
    return SimulatedRequest(request, length, 0, 0.0, acceptance)


def step_s(*settings):
    costs = StepCosts(1, TwoDrafters(0.01))
    for i, setting in enumerate(settings):
        one = member(str(i))
        one.draft(setting, costs.paces)
        costs.add(one)
    return costs.step_s()(10.0)


def verify_s(window):
    return 0.01 * (1 + 0.01 * window)


def share(setting, pace=math.inf, acceptance=0.5):
    """Return the mean number of draft tokens that a step verifies, drafted ahead for a request that
    is alone."""
    return streamed_step(setting.window, acceptance, pace, alone=True).num_verified


def test_drafting_in_turn_is_added_and_drafting_ahead_is_hidden():
    assert step_s(IN_TURN) == pytest.approx(verify_s(4) + 0.004)
    assert step_s(AHEAD) == pytest.approx(verify_s(share(AHEAD)))
    assert step_s(None) == pytest.approx(0.01)


def test_in_one_batch_all_wait_for_drafting_in_turn():
    mean = (4 + share(AHEAD)) / 2
    assert step_s(IN_TURN, AHEAD) == pytest.approx(verify_s(mean) + 0.004)
    assert step_s(IN_TURN, None) == pytest.approx(verify_s(2) + 0.004)


def test_drafters_in_turn_add_up_and_drafters_ahead_do_not():
    slow = DraftSetting("slow", 2)
    assert step_s(IN_TURN, slow) == pytest.approx(verify_s(3) + 0.004 + 0.01)
    slow = DraftSetting("slow", 2, coupled=False)
    mean = (share(AHEAD) + share(slow)) / 2
    assert step_s(AHEAD, slow) == pytest.approx(verify_s(mean))


def test_paces_are_those_of_the_batch():
    costs = StepCosts(1, TwoDrafters(0.01))
    for i, drafter in enumerate(("small", "slow")):
        one = member(str(i))
        one.draft(DraftSetting(drafter, 4, coupled=False))
        costs.add(one)
    assert costs.set_paces(10.0)
    assert costs.paces == {"small": (10.0, False), "slow": (2.0, False)}
    assert not costs.set_paces(10.0)
    costs.remove(one)
    assert costs.set_paces(10.0)
    assert costs.paces["small"].alone


def finish(batch):
    batch.advance(1e9)
    return {m.request.id.prompt_key: m for m in batch.finished}


def batch_of(*members, latency=LATENCY):
    batch = VirtualBatch(1, latency, 8, None)
    batch.add(members, 0.0)
    return batch


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("drafter", ["small", "slow"])
def test_a_request_is_as_fast_as_its_protocol(acceptance, window, drafter):
    """A step takes as long as 2 draft tokens of `slow`, and longer than 8 of `small`."""
    setting = DraftSetting(drafter, window, coupled=False)
    latency = TwoDrafters(0.01)
    done = finish(batch_of(member("a", setting, acceptance, 20_000), latency=latency))["a"]
    draft_s = latency.draft_s(drafter, 1, 1)
    mean_s = verify_s(share(setting, 0.01 / draft_s, acceptance))
    tokens = streamed_step(window, acceptance, mean_s / draft_s, alone=True).tokens
    assert 20_000 / done.finished_s == pytest.approx(tokens / mean_s, rel=0.01)


def test_counts_of_drafting_ahead_add_up():
    done = finish(batch_of(member("a", AHEAD, 0.5, 3001)))["a"]
    step = streamed_step(4, 0.5, 10.0, alone=True)
    steps = round((done.finished_s - 0.01) / verify_s(step.num_verified))
    assert done.num_verifications == pytest.approx(steps * step.verifying, abs=1)
    assert done.num_draft_tokens == pytest.approx(steps * step.num_verified, abs=1)
    # A window drafted ahead has as many accepted tokens as one in turn.
    rate = done.num_accepted_tokens / done.num_draft_tokens
    assert rate == pytest.approx((0.5 + 0.5**2 + 0.5**3 + 0.5**4) / 4, rel=0.02)


def test_acceptances_are_of_each_drafter():
    both = {"small": 0.5, "slow": 0.9}
    for drafter, p in both.items():
        done = finish(batch_of(member("a", DraftSetting(drafter, 1), both, 1900)))["a"]
        assert done.num_accepted_tokens / done.num_draft_tokens == pytest.approx(p, abs=0.01)
    rejected = finish(batch_of(member("a", DraftSetting("other", 1), both, 100)))["a"]
    assert rejected.num_accepted_tokens == 0


def test_request_keeps_its_own_drafting():
    batch = batch_of(member("own", IN_TURN, 0.5, 400), member("other", None, 0.5, 400))
    batch.set_drafting(DraftSetting("small", 1), 1.0)
    done = finish(batch)
    assert done["own"].num_draft_tokens == 4 * done["own"].num_verifications
    assert done["other"].num_draft_tokens == done["other"].num_verifications > 0


@settings(deadline=None)
@given(st.floats(0.02, 0.8), st.integers(1, 8), st.booleans())
def test_redrafting_loses_nothing_and_holds_from_the_end_of_the_step(at_s, window, coupled):
    batch = batch_of(member("a", IN_TURN, 0.5, 500), member("b", IN_TURN, 0.5, 500))
    setting = DraftSetting("small", window, coupled)
    batch.redraft({id_of("a"): setting, id_of("gone"): setting}, at_s)
    a, b = batch.find(id_of("a")), batch.find(id_of("b"))
    steps = batch.steps_at(at_s)
    assert a.tokens(steps) == b.tokens(steps)
    drafted = a.drafted(steps)
    assert drafted == b.drafted(steps)
    if setting != IN_TURN:
        assert a.progress(steps).setting == setting
        assert (a.progress(steps).num_draft_tokens, a.progress(steps).num_accepted_tokens) == (0, 0)
    done = finish(batch)
    assert done["b"].num_draft_tokens == 4 * done["b"].num_verifications
    assert done["a"].num_draft_tokens >= drafted[0]


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.integers(1, 12), st.integers(1, 30))
def test_accepted_tokens_never_exceed_drafted_ones(acceptance, window, steps):
    batch = batch_of(member("a", IN_TURN, acceptance), latency=TwoDrafters(0.01))
    batch.redraft({id_of("a"): DraftSetting("slow", window, coupled=False)}, 0.1)
    batch.redraft({id_of("a"): DraftSetting("small", window, coupled=False)}, 0.2)
    one = batch.find(id_of("a"))
    for step in range(batch.steps_at(0.2), batch.steps_at(0.2) + steps):
        told = one.progress(step)
        assert 0 <= told.num_accepted_tokens <= told.num_draft_tokens
