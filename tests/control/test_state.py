"""Predicted states after each kind of move, compared with sums by hand."""

from collections import defaultdict
from dataclasses import replace

import pytest

from engines.control.effects import deal, working
from engines.control.objective import FewestGpuSeconds, SoonestEnd
from engines.control.outlook import Outlook
from engines.control.state import Forecaster
from engines.latency.forecast import Unfinished
from engines.pat.remaining import FromHistory
from engines.rollout.moves import Defer, Migrate, Race, Reshape
from schemas.drafting import HISTORY
from schemas.rollout import DraftProgress, DraftSetting, LengthHistory
from tests.control.scenes import (
    EXPECTED,
    LARGE,
    MACHINE,
    MAX_TOKENS,
    POOLS,
    SMALL,
    costs,
    effects,
    outlook,
    request,
    told,
    view_of,
)
from tests.latency.machines import finish_s

TOKENS = {0: {1: 7000, 2: 4000}, 1: {3: 7500}, 2: {}, 3: {4: 1000}}


def state_of(tokens=TOKENS, **given):
    return outlook().forecast(view_of(tokens, **given))


def ids_on(state, engine):
    return {copy.id for copy in state.engines[engine].copies}


def test_an_end_is_the_forecast_of_its_engine():
    state = state_of()
    requests = [Unfinished(100 + t, MAX_TOKENS - t) for t in (7000, 4000)]
    alone_s = finish_s(MACHINE, 2, [Unfinished(1100, 7000)])
    assert state.ends_s[state.rows[request(2)]] == pytest.approx(finish_s(MACHINE, 2, requests))
    assert state.end_s == pytest.approx(alone_s)
    assert state.engine_end_s(2) == 0.0


def test_a_course_is_the_same_however_often_it_is_looked_at():
    state = state_of(drafting={3: told(SMALL, 1.0)})
    for engine in state.engines.values():
        late = replace(engine, delay_s=2.0)
        for now in (engine, late):
            forecast = state.forecaster.forecast(now)
            assert forecast.end_s == max(forecast.times_s.values(), default=0.0)
            moments = [forecast.later(wait_s) for wait_s in (3.0, 1.0, 3.0)]
            assert moments[0] == moments[2]
            assert moments == [state.forecaster.forecast(now).later(w) for w in (3.0, 1.0, 3.0)]
            assert moments[1].delay_s == (now.delay_s and 1.0) or not now.copies


def test_drafted_request_ends_sooner_and_pays_for_drafting():
    plain, drafted = state_of(), state_of(drafting={3: told(SMALL, 1.0)})
    # All drafts of window 4 are accepted: 5 tokens a step, and 4 ms of drafting before each.
    step_s = MACHINE.verify_s(2, 1, 4600, 4) + 4e-3
    assert drafted.engine_end_s(3) == pytest.approx(7000 / 5 * step_s, rel=0.01)
    assert drafted.engine_end_s(3) < plain.engine_end_s(3)


def test_a_race_ends_with_the_first_of_its_copies():
    state = state_of()
    effect = effects().of(state, [Race(request(4), 2, LARGE)])
    row, after = state.rows[request(4)], effect.after(state)
    assert after.holders[row] == (3, 2)
    assert after.ends_s[row] == after.times_s[2][row] < after.times_s[3][row]
    assert after.times_s[3] == state.times_s[3]
    (copy,) = after.engines[2].copies
    assert (copy.drafting, copy.acceptance) == (LARGE, EXPECTED["large"])
    assert after.engines[2].delay_s == MACHINE.prefill_s(2, 1, 1100)
    slow = Race(request(4), 2, SMALL)
    assert effects().of(after, [slow]) is None, "raced to an engine that has a copy"


def test_migrated_request_pays_for_its_prefill():
    state = state_of()
    after = effects().of(state, [Migrate(request(2), 1)]).after(state)
    assert ids_on(after, 0) == {request(1)}
    assert ids_on(after, 1) == {request(2), request(3)}
    assert after.engines[1].delay_s == MACHINE.prefill_s(2, 1, 4100)
    both = effects().of(state, [Migrate(request(2), 2), Migrate(request(1), 2)]).after(state)
    assert ids_on(both, 2) == {request(1), request(2)}
    assert both.engine_end_s(0) == 0.0


def test_deferred_request_leaves_the_state():
    state = state_of()
    effect = effects().of(state, [Defer(request(2), 1)])
    assert state.rows[request(2)] not in effect.after(state).ends_s
    assert SoonestEnd().gain(state, effect).own > 0


def test_a_raced_request_neither_migrates_nor_is_deferred():
    state = state_of({0: {1: 50}, 1: {1: 60}, 2: {}})
    assert effects().of(state, [Migrate(request(1), 2)]) is None
    assert effects().of(state, [Defer(request(1), 2)]) is None


def test_a_switch_takes_all_requests_along_once():
    state = state_of({**TOKENS, 2: {4: 900}})
    at_once = replace(effects(), costs=replace(costs(), ahead=False))
    after = at_once.of(state, [Reshape(0, 4)]).after(state)
    assert set(after.engines) == {8, 9}
    assert sorted(copy.context_tokens for e in after.engines.values() for copy in e.copies) == [
        1100,
        4100,
        7100,
        7600,
    ]
    forecasts = [state.forecast(engine) for engine in working(POOLS[0], state)]
    made = at_once.switched(forecasts, POOLS[0], 4, move_kv=True)
    assert {engine.delay_s for engine in after.engines.values()} == {made.ready_s}
    assert effects().of(after, [Reshape(0, 4)]) is None, "switched to the present layout"
    back = effects().of(after, [Reshape(0, 2)]).after(after)
    assert set(back.engines) == {0, 1, 2, 3}


def test_pool_is_in_view_with_all_its_engines():
    assert working(POOLS[0], state_of({0: {1: 1}, 1: {}, 2: {}})) is None
    assert working(POOLS[0], state_of({0: {}, 1: {}, 2: {}, 3: {}})) is None
    assert effects().of(state_of({0: {1: 1}, 1: {}}), [Reshape(0, 8)]) is None


def test_dealt_as_the_coordinator_deals():
    copies = state_of().engines[0].copies + state_of().engines[3].copies
    one, two = deal(copies, (8, 9), 4)
    assert [c.id for c in one.copies] == [request(1)]
    assert [c.id for c in two.copies] == [request(2), request(4)]


def test_gpu_seconds_count_every_gpu_until_its_engine_is_free():
    state = state_of()
    total = 2 * sum(state.engine_end_s(engine) for engine in state.engines)
    assert FewestGpuSeconds().total(state) == pytest.approx(total)
    effect = effects().of(state, [Reshape(0, 8)])
    gain, after = FewestGpuSeconds().gain(state, effect), effect.after(state)
    assert gain.own == pytest.approx(total - 8 * after.engine_end_s(10))
    assert gain.alone == pytest.approx(total)


def test_last_reports_count_until_newer_ones_arrive():
    """The last reported tokens and drafting count until newer reports arrive."""
    memory = outlook()
    memory.forecast(view_of(TOKENS, drafting={0: told(SMALL, 0.7)}))
    moved = memory.forecast(view_of({10: {1: 0, 2: 0}}, {10: 8}))
    assert [copy.context_tokens for copy in moved.engines[10].copies] == [7100, 4100]
    assert {copy.drafting for copy in moved.engines[10].copies} == {SMALL}
    assert {round(copy.acceptance, 1) for copy in moved.engines[10].copies} == {0.7}
    memory.note([Race(request(1), 3, LARGE)])
    raced = {**TOKENS, 3: {1: 0}}
    lagging = memory.forecast(view_of(raced, drafting={0: told(SMALL, 0.5)}))
    assert [copy.drafting for copy in lagging.engines[0].copies] == [SMALL, SMALL]
    assert [copy.drafting for copy in lagging.engines[3].copies] == [LARGE]
    memory.forecast(view_of(raced, drafting={3: told(LARGE, 0.5)}))
    again = memory.forecast(view_of(raced, drafting={3: told(SMALL, 0.5)}))
    assert [copy.drafting for copy in again.engines[3].copies] == [SMALL]


def test_a_conversation_that_begins_anew_has_its_own_length():
    """It has fewer tokens than in the view before, and is not longer for that."""
    history = {request(index).prompt_key: LengthHistory(100.0, 300) for index in range(1, 5)}

    def memory():
        remaining = FromHistory(history, MAX_TOKENS, group_size=8)
        return Outlook(Forecaster(MACHINE), remaining, defaultdict(lambda: 100))

    one, again = memory(), view_of({**TOKENS, 0: {1: 30, 2: 4000}})
    one.forecast(view_of(TOKENS))
    found = one.forecast(again)
    assert found.engines == memory().forecast(again).engines
    (first, _) = found.engines[0].copies
    assert first.context_tokens == 130
    assert first.remaining_tokens < 300


def test_a_conversation_has_observed_tokens_in_its_context():
    view = view_of({0: {1: 500}, 1: {2: 500}})
    talking = outlook(context_rates={request(1).prompt_key: 1.5}).forecast(view).engines
    (first,), (other,) = (talking[index].copies for index in (0, 1))
    assert first.context_tokens - other.context_tokens == 250
    assert first.advanced(100).context_tokens == first.context_tokens + 150
    assert first.context_at_end == first.context_tokens + 1.5 * first.remaining_tokens


def test_prompt_acceptance_counts_until_its_request_has_some():
    history = DraftSetting(HISTORY, 4)
    memory = outlook(
        expected_acceptance={HISTORY: 0.5},
        prompt_acceptance={"p0": 0.9, "p1": 0.9, "p2": 0.9},
        default_drafting=history,
    )
    told_of = {0: told(history, 0.0), 1: DraftProgress(history), 2: DraftProgress(SMALL)}
    view = view_of({engine: {engine: 10} for engine in told_of}, drafting=told_of)
    state = memory.forecast(view)
    found = [state.engines[engine].copies[0].acceptance for engine in told_of]
    # The first request's own acceptance, the prompt's acceptance, and another drafter's.
    assert found == [0.0, 0.9, 0.0]
    # The fourth prompt is unknown, so the expected acceptance applies.
    unseen = memory.forecast(view_of({0: {3: 10}})).engines[0].copies[0]
    assert unseen.acceptance == 0.5


def test_few_tokens_do_not_change_an_acceptance():
    state = state_of(drafting={0: DraftProgress(SMALL, 10, 0), 1: told(SMALL, 0.3)})
    known = state.engines[1].copies[0].acceptance
    assert {copy.acceptance for copy in state.engines[0].copies} == {known}
