"""The controller makes the switches that pay on average over scenarios, in few and quick looks."""

import time
from dataclasses import replace
from statistics import median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from refrain.engines.control.controller import SCENARIOS
from refrain.engines.control.reshaping import PoolLook, Reshaping
from refrain.engines.control.switches import switched
from refrain.engines.rollout.moves import Reshape
from refrain.schemas.layout import Pool
from tests.control.scenes import (
    MAX_TOKENS,
    POOLS,
    SMALL,
    controller_of,
    costs,
    outlook,
    request,
    some_tokens,
    told,
    view_of,
)

few = settings(deadline=None, max_examples=25)
TAIL = {0: {1: 200, 2: 7900}, 1: {3: 7800}, 2: {}, 3: {}, **{e: {} for e in range(4, 8)}}


def may_be_made(look: PoolLook, degree: int, kv: bool) -> bool:
    """Return whether all latencies of a switch are known, and, where free engines begin the next
    step, whether no engine becomes free before it."""
    made = switched(look.reshaping.costs, look._forecasts, look.pool, degree, kv)
    assert made
    in_time = look.reshaping.idles or look._all_there(made)
    return in_time and look._knows(*look.sources, *made.targets)


@few
@given(some_tokens, st.booleans())
# With its keys and values, a switch to TP 4 would gain more, but an engine is free before it.
@example({5: {500: 1}, 6: {600: 7946}, 7: {700: 1, 701: 1, 702: 7544, 703: 7948}}, False)
def test_each_switch_is_the_best_of_its_pool_and_beats_none(tokens, idles):
    tokens = {engine: tokens.get(engine, {}) for engine in range(8)}
    view, controller = view_of(tokens), controller_of(idles)
    moves = controller.decide(view)
    assert len({move.pool for move in moves}) == len(moves)
    assert moves == controller_of(idles).decide(view)
    state = outlook().forecast(view)
    for move in moves:
        look = controller.reshaping.look(POOLS[move.pool], state)
        gains = {
            (degree, kv): look.gain(degree, move_kv=kv)
            for degree in (4, 8)
            for kv in (True, False)
            if may_be_made(look, degree, kv)
        }
        assert max(gains.values()) == gains[move.tp_degree, move.move_kv] > 0.0


def test_a_pool_in_its_tail_is_reshaped():
    (move,) = controller_of().decide(view_of(TAIL))
    assert (move.pool, move.tp_degree) == (0, 8)


def test_nothing_when_nothing_pays():
    assert controller_of(wake_s=1e4).decide(view_of(TAIL)) == []
    assert controller_of(margin=10.0).decide(view_of(TAIL)) == []
    nearly_done = {engine: {engine: MAX_TOKENS - 2} for engine in range(8)}
    assert controller_of().decide(view_of(nearly_done)) == []


def test_gpu_seconds_do_not_pay_for_a_single_straggler():
    """All 8 GPUs finish one request sooner, but not eight times sooner."""
    assert controller_of(idles=True).decide(view_of(TAIL))
    assert not controller_of(idles=False).decide(view_of(TAIL))


def looks_of(controller) -> list:
    """Return a list that will have the engines of each forecast."""
    looks, forecast = [], controller.outlook.forecast

    def looked(view, *scenario):
        looks.append([engine.engine for engine in view.engines])
        return forecast(view, *scenario)

    controller.outlook.forecast = looked
    return looks


def test_rounds_are_few():
    controller = controller_of(margin=10.0, every_s=5.0)
    looks, at_s = looks_of(controller), []

    def decide(tokens, elapsed_s):
        before = len(looks)
        controller.decide(view_of(tokens, elapsed_s=elapsed_s))
        at_s.extend([elapsed_s] * (len(looks) - before))

    busy = {e: {10 * e + i: 100 for i in range(4)} for e in range(8)}
    for elapsed_s in range(8):
        decide(busy, elapsed_s)
    assert at_s == [0, 5]
    decide({**busy, 3: {}}, 7.5)
    assert at_s == [0, 5, 7.5], "no look though an engine became free"
    decide({**busy, 3: {}}, 8.0)
    decide({**busy, 3: {}, 4: {40: 1}}, 8.5)
    assert at_s == [0, 5, 7.5, 8.5], "no look though a sixteenth has finished"


def test_a_round_of_many_takes_several_goes():
    controller = controller_of(margin=10.0, max_requests=8)
    looks = looks_of(controller)
    busy = {e: {10 * e + i: 100 for i in range(2)} for e in range(8)}
    for elapsed_s in (0, 1, 2, 5):
        controller.decide(view_of(busy, elapsed_s=elapsed_s))
    assert looks == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    controller.decide(view_of(busy, elapsed_s=10))
    assert looks[3] == [4, 5, 6, 7], "the last round has not looked at these"


def test_large_batches_are_not_changed():
    large = {e: {10 * e + i: 7000 for i in range(4)} for e in (0, 4)} | {
        e: {} for e in (1, 2, 3, 5, 6, 7)
    }
    assert controller_of(max_batch=3).decide(view_of(large)) == []
    assert controller_of(max_batch=4).decide(view_of(large))


@pytest.mark.parametrize(("num_engines", "each"), [(64, 32), (512, 8)])
def test_decisions_are_quick_and_rounds_cover_all_engines(num_engines, each):
    """Pools of four engines with drafting. One engine in sixteen is free. The bound is CPU time and
    leaves room for a busy machine."""
    tokens = {e: {100 * e + i: 37 * i + e for i in range(each)} for e in range(num_engines)}
    tokens |= {e: {} for e in range(0, num_engines, 16)}
    pools = {p: Pool(p, {2: tuple(range(4 * p, 4 * p + 4))}) for p in range(num_engines // 4)}
    for p, pool in pools.items():
        first = num_engines + 3 * p
        layouts = {4: (first, first + 1), 8: (first + 2,)}
        pools[p] = replace(pool, engines={**pool.engines, **layouts})
    view = view_of(tokens, drafting={e: told(SMALL, 0.6) for e in tokens})
    controller = controller_of(pools=pools, max_requests=256)
    looks, seconds = looks_of(controller), []
    while len({engine for look in looks for engine in look}) < num_engines:
        began_s = time.process_time()
        controller.decide(view)
        seconds.append(time.process_time() - began_s)
    assert len(seconds) == pytest.approx(num_engines * each / 256, abs=2)
    assert median(seconds) < 0.2


class Varied:
    """Remaining lengths that differ by scenario."""

    is_known = True

    def __init__(self, *to_come):
        self.to_come = dict(zip((0.0, *SCENARIOS), to_come, strict=True))

    def tokens(self, generated, scenario=0.0):
        return dict.fromkeys(generated, float(self.to_come[scenario]))


@pytest.mark.parametrize(("to_come", "switches"), [((5000, 4000, 3000), 1), ((300, 1, 1), 0)])
def test_move_must_pay_on_average_over_scenarios(to_come, switches):
    """The switch pays in the main forecast. In the second case it loses on average, because other
    scenarios end at once."""
    view = view_of({0: {1: 100}, **{e: {} for e in range(1, 4)}})
    for lengths, expected in ((to_come[:1] * 3, 1), (to_come, switches)):
        controller = controller_of()
        controller.outlook.remaining = Varied(*lengths)
        assert len(controller.decide(view)) == expected


class Lengths:
    """Known remaining lengths by request."""

    is_known = True

    def __init__(self, to_come):
        self.to_come = {request(index): float(num) for index, num in to_come.items()}

    def tokens(self, generated, scenario=0.0):
        del scenario
        return {id: self.to_come[id] for id in generated}


@pytest.mark.parametrize(("shares", "switched"), [(False, {0, 1}), (True, {1})])
def test_pool_that_is_not_last_keeps_its_engines(shares, switched):
    """The second pool takes twice as long as the first. Both would be faster at a higher TP
    degree."""
    controller = controller_of(shares_engines=shares)
    controller.outlook.remaining = Lengths({1: 3000, 2: 6000})
    tokens = {0: {1: 100}, 4: {2: 100}}
    view = view_of({e: tokens.get(e, {}) for e in range(8)})
    assert {move.pool for move in controller.decide(view)} == switched


def test_last_pool_is_unknown_until_all_were_seen():
    """The first look sees the first pool only. After the second look both ends are known."""
    controller = controller_of(shares_engines=True, max_requests=1)
    controller.outlook.remaining = Lengths({1: 6000, 2: 3000})
    tokens = {0: {1: 100}, 4: {2: 100}}
    views = [view_of({e: tokens.get(e, {}) for e in range(8)}, elapsed_s=6.0 * i) for i in (0, 1)]
    looks = [[move.pool for move in controller.decide(view)] for view in views for _ in range(2)]
    assert looks == [[], [], [0], []]


def test_a_switch_that_is_better_later_waits():
    """Most requests are nearly done and one is not: a switch pays now, and pays more later."""
    tokens = {e: {100 * e + i: 7000 for i in range(60)} for e in range(4)}
    tokens[0][999] = 100
    state = outlook().forecast(view_of(tokens))
    at_once, patient = Reshaping(costs(), POOLS, wait_shares=()), Reshaping(costs(), POOLS)
    assert at_once.look(POOLS[0], state).best()
    assert not patient.look(POOLS[0], state).best()


def test_a_raced_request_that_ends_elsewhere_needs_no_switch():
    """The copy on the other pool is nearly done."""
    alone = view_of({0: {1: 100}, **{e: {} for e in range(1, 8)}})
    assert controller_of().decide(alone) == [Reshape(0, 8, move_kv=True)]
    raced = view_of({0: {1: 100}, 4: {1: MAX_TOKENS - 2}, **{e: {} for e in (1, 2, 3, 5, 6, 7)}})
    assert controller_of().decide(raced) == []
