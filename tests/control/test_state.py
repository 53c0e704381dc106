"""Predicted states now and after a switch, compared with sums by hand."""

from collections import defaultdict
from dataclasses import replace

import pytest

from refrain.engines.control.outlook import Outlook
from refrain.engines.control.reshaping import Reshaping
from refrain.engines.control.state import Forecaster
from refrain.engines.control.switches import deal, switched, working
from refrain.engines.latency.forecast import Unfinished
from refrain.engines.pat.remaining import FromHistory
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import DraftProgress, DraftSetting, LengthHistory
from tests.control.scenes import (
    LARGE,
    MACHINE,
    MAX_TOKENS,
    POOLS,
    SMALL,
    costs,
    outlook,
    request,
    told,
    view_of,
)
from tests.latency.machines import finish_s

TOKENS = {0: {1: 7000, 2: 4000}, 1: {3: 7500}, 2: {}, 3: {4: 1000}}


def state_of(tokens=TOKENS, **given):
    return outlook().forecast(view_of(tokens, **given))


def test_an_end_is_the_forecast_of_its_engine():
    state = state_of()
    requests = [Unfinished(100 + t, MAX_TOKENS - t) for t in (7000, 4000)]
    alone_s = finish_s(MACHINE, 2, [Unfinished(1100, 7000)])
    (row,) = (copy.row for copy in state.forecasts[0].engine.copies if copy.id == request(2))
    assert state.ends_s[row] == pytest.approx(finish_s(MACHINE, 2, requests))
    assert state.end_s == pytest.approx(alone_s)
    assert state.engine_end_s(2) == 0.0


def test_a_course_is_the_same_however_often_it_is_looked_at():
    state = state_of(drafting={3: told(SMALL, 1.0)})
    for forecast in state.forecasts.values():
        assert forecast.end_s == max(forecast.times_s.values(), default=0.0)
        moments = [forecast.later(wait_s) for wait_s in (3.0, 1.0, 3.0)]
        assert moments[0] == moments[2]
        again = state.forecaster.forecast(forecast.engine)
        assert moments == [again.later(wait_s) for wait_s in (3.0, 1.0, 3.0)]


def test_drafted_request_ends_sooner_and_pays_for_drafting():
    plain, drafted = state_of(), state_of(drafting={3: told(SMALL, 1.0)})
    # All drafts of window 4 are accepted: 5 tokens a step, and 4 ms of drafting before each.
    step_s = MACHINE.verify_s(2, 1, 4600, 4) + 4e-3
    assert drafted.engine_end_s(3) == pytest.approx(7000 / 5 * step_s, rel=0.01)
    assert drafted.engine_end_s(3) < plain.engine_end_s(3)


def test_a_raced_request_ends_with_the_first_of_its_copies():
    drafting = {2: told(LARGE, 1.0), 3: told(SMALL, 0.1)}
    state = state_of({**TOKENS, 2: {4: 1000}}, drafting=drafting)
    (row,) = (copy.row for copy in state.forecasts[3].engine.copies)
    first, second = (state.forecasts[e].times_s[row] for e in (2, 3))
    assert state.ends_s[row] == first < second
    assert state.engine_end_s(3) == first, "the loser stops with the winner"


def test_a_switch_takes_all_requests_along_once():
    state = state_of({**TOKENS, 2: {4: 900}})
    forecasts = [state.forecasts[engine.engine] for engine in working(POOLS[0], state)]
    at_once = replace(costs(), ahead=False)
    made = switched(at_once, forecasts, POOLS[0], 4, move_kv=True)
    assert [engine.engine for engine in made.targets] == [8, 9]
    assert sorted(copy.context_tokens for e in made.targets for copy in e.copies) == [
        1100,
        4100,
        7100,
        7600,
    ]
    batches = [
        [[c.context_tokens for c in e.copies] for e in of] for of in (made.sources, made.targets)
    ]
    assert made.ready_s == pytest.approx(1.0 + at_once.move_s(2, 4, *batches))


def test_pool_is_in_view_with_all_its_engines():
    assert working(POOLS[0], state_of({0: {1: 1}, 1: {}, 2: {}})) is None
    assert working(POOLS[0], state_of({0: {}, 1: {}, 2: {}, 3: {}})) is None


def test_dealt_as_the_coordinator_deals():
    forecasts = state_of().forecasts
    copies = forecasts[0].engine.copies + forecasts[3].engine.copies
    one, two = deal(copies, (8, 9), 4)
    assert [c.id for c in one.copies] == [request(1)]
    assert [c.id for c in two.copies] == [request(2), request(4)]


def test_gpu_seconds_count_every_gpu_until_its_engine_is_free():
    look = Reshaping(costs(), POOLS, idles=False).look(POOLS[0], state_of())
    assert look.stays == pytest.approx(2 * sum(look.ends_s))
    forecasts = [look.state.forecasts[engine] for engine in range(4)]
    made = switched(costs(), forecasts, POOLS[0], 8, move_kv=True)
    end_s = made.ready_s + look.state.forecaster.forecast(made.targets[0]).end_s
    assert look.gain(8, move_kv=True) == pytest.approx(look.stays - 8 * end_s)


def test_last_reports_count_until_newer_ones_arrive():
    """The last reported tokens and drafting count until newer reports arrive."""
    memory = outlook()
    memory.forecast(view_of(TOKENS, drafting={0: told(SMALL, 0.7)}))
    moved = memory.forecast(view_of({10: {1: 0, 2: 0}}, {10: 8}))
    assert [copy.context_tokens for copy in moved.forecasts[10].engine.copies] == [7100, 4100]
    assert {copy.drafting for copy in moved.forecasts[10].engine.copies} == {SMALL}
    assert {round(copy.acceptance, 1) for copy in moved.forecasts[10].engine.copies} == {0.7}


def test_a_conversation_that_begins_anew_has_its_own_length():
    """It has fewer tokens than in the view before, and is not longer for that."""
    history = {request(index).prompt_key: LengthHistory(100.0, 300) for index in range(1, 5)}

    def memory():
        remaining = FromHistory(history, MAX_TOKENS, group_size=8)
        return Outlook(Forecaster(MACHINE), remaining, defaultdict(lambda: 100))

    one, again = memory(), view_of({**TOKENS, 0: {1: 30, 2: 4000}})
    one.forecast(view_of(TOKENS))
    found, fresh = (m.forecast(again).forecasts for m in (one, memory()))
    assert {i: of.engine for i, of in found.items()} == {i: of.engine for i, of in fresh.items()}
    (first, _) = found[0].engine.copies
    assert first.context_tokens == 130
    assert first.remaining_tokens < 300


def test_a_conversation_has_observed_tokens_in_its_context():
    view = view_of({0: {1: 500}, 1: {2: 500}})
    talking = outlook(context_rates={request(1).prompt_key: 1.5}).forecast(view).forecasts
    (first,), (other,) = (talking[index].engine.copies for index in (0, 1))
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
    found = [state.forecasts[engine].engine.copies[0].acceptance for engine in told_of]
    # The first request's own acceptance, the prompt's acceptance, and another drafter's.
    assert found == [0.0, 0.9, 0.0]
    # The fourth prompt is unknown, so the expected acceptance applies.
    unseen = memory.forecast(view_of({0: {3: 10}})).forecasts[0].engine.copies[0]
    assert unseen.acceptance == 0.5


def test_few_tokens_do_not_change_an_acceptance():
    state = state_of(drafting={0: DraftProgress(SMALL, 10, 0), 1: told(SMALL, 0.3)})
    known = state.forecasts[1].engine.copies[0].acceptance
    assert {copy.acceptance for copy in state.forecasts[0].engine.copies} == {known}
