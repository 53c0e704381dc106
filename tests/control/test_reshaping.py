"""PAT's algorithm 1 agrees with brute force, and equals the best single switch in hindsight."""

import itertools
import math
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from refrain.engines.control.controller import Controller
from refrain.engines.pat.remaining import Maximum
from refrain.engines.rollout.moves import EngineView, Reshape, RolloutView
from refrain.engines.specactor.ladder import token_acceptance
from refrain.schemas.layout import Pool
from refrain.schemas.rollout import DraftProgress, DraftSetting
from tests.pat.stage import (
    ON_A40,
    POOL,
    PROMPT_TOKENS,
    costs_on_a40,
    current_s,
    long_tailed,
    play,
    request,
    switch_at,
    switched_s,
    switching,
    view_of,
)
from tests.simulate.latencies import LinearLatency

OTHER_POOL = Pool(1, {2: (7, 8), 4: (9,)})


@dataclass(frozen=True)
class ShardedLatency:
    """Divides the loads of a step among t GPUs, and adds the time of t - 1 exchanges."""

    load_s: float = 0.02
    each_s: float = 1e-4
    token_s: float = 1e-7
    exchange_s: float = 1e-3
    exchange_each_s: float = 5e-5
    prefill_token_s: float = 1e-4

    def decode_s(self, tp_degree, batch, context_tokens):
        loaded_s = (self.load_s + self.each_s * batch + self.token_s * context_tokens) / tp_degree
        return loaded_s + (tp_degree - 1) * (self.exchange_s + self.exchange_each_s * batch)

    def prefill_s(self, tp_degree, batch, rms_tokens):
        return self.prefill_token_s * batch * rms_tokens / tp_degree

    def verify_s(self, tp_degree, batch, context_tokens, window):
        return self.decode_s(tp_degree, batch, context_tokens) * (1 + 0.05 * window)

    def draft_s(self, *_):
        return 0.0


SHARDED = ShardedLatency()
latencies = st.builds(
    ShardedLatency,
    load_s=st.floats(1e-3, 0.1),
    each_s=st.floats(0, 1e-3),
    exchange_s=st.floats(0, 5e-3),
    exchange_each_s=st.floats(0, 5e-4),
)
progresses = st.lists(st.integers(0, 400), max_size=12)
batches_of_4 = st.lists(progresses, min_size=4, max_size=4).filter(any)
wakes_s = st.floats(0.0, 5.0)
LONGEST = 600


def numbered(per_engine: list[list[int]]) -> dict[int, dict[int, int]]:
    index = itertools.count()
    return {e: {next(index): num for num in of} for e, of in enumerate(per_engine)}


def paper(latency, wake_s, **fields) -> Controller:
    """Return a controller with algorithm 1 as printed: maximum lengths, and no later switches."""
    costs = costs_on_a40(latency, wake_s=wake_s)
    at = {"costs": costs, "remaining": Maximum(LONGEST), "wait_shares": ()}
    return switching(latency=latency, **(at | fields))


def brute_force(latency, costs, per_engine: list[list[int]], tp_degrees) -> dict[int, float]:
    """Return the seconds at each TP degree, step by step. The present one needs no switch."""
    context = [[PROMPT_TOKENS + num for num in of] for of in per_engine]
    seconds = {2: max(_decode_all(latency, 2, of) for of in context)}
    per_token_s = costs.kv_bytes_per_token / costs.link_bytes_per_s
    ahead_s = max(map(sum, context)) * per_token_s / 2
    then = [_decode_for(latency, 2, of, ahead_s) for of in context]
    # All requests grow at the same pace, so the longest ones end first.
    since = max(
        sum(left) - sum(sorted(before)[: len(left)])
        for before, left in zip(context, then, strict=True)
    )
    for tp in tp_degrees:
        now, later = _dealt(context, tp), _dealt(then, tp)
        recomputed_s = max(
            latency.prefill_s(tp, len(t), (sum(x * x for x in t) / len(t)) ** 0.5) for t in now if t
        )
        # Requests go on while their KV is saved. Once stopped, save the newer KV and load all.
        moved_s = (since / 2 + max(map(sum, later)) / tp) * per_token_s
        ways = [recomputed_s + max(_decode_all(latency, tp, t) for t in now)]
        if any(later):
            ways.append(ahead_s + moved_s + max(_decode_all(latency, tp, t) for t in later))
        seconds[tp] = costs.wake_s + min(ways)
    return seconds


def _dealt(per_engine: list[list[int]], tp_degree: int) -> list[list[int]]:
    loads = [0] * len(POOL.engines[tp_degree])
    targets: list[list[int]] = [[] for _ in loads]
    for tokens in sorted(itertools.chain(*per_engine), reverse=True):
        place = loads.index(min(loads))
        loads[place] += tokens
        targets[place].append(tokens)
    return targets


def _decode_all(latency, tp_degree, contexts: list[int]) -> float:
    seconds, longest = 0.0, PROMPT_TOKENS + LONGEST
    running = list(contexts)
    while running:
        seconds += latency.decode_s(tp_degree, len(running), sum(running) + len(running) / 2)
        running = [tokens + 1 for tokens in running if tokens + 1 < longest]
    return seconds


def _decode_for(latency, tp_degree, contexts: list[int], seconds: float) -> list[int]:
    """Return the contexts of the requests that are left after `seconds`."""
    running = list(contexts)
    while running and seconds > 0.0:
        seconds -= latency.decode_s(tp_degree, len(running), sum(running) + len(running) / 2)
        running = [tokens + 1 for tokens in running if tokens + 1 < PROMPT_TOKENS + LONGEST]
    return running


@given(latencies, wakes_s, batches_of_4)
@settings(deadline=None, max_examples=60)
def test_the_switch_is_that_of_brute_force(latency, wake_s, per_engine):
    controller = paper(latency, wake_s)
    seconds = brute_force(latency, controller.reshaping.costs, per_engine, (4, 8))
    fastest, second = sorted(seconds.values())[:2]
    assume(second - fastest > 0.01 * second)
    view = view_of(2, numbered(per_engine))
    moves = controller.decide(view)
    best = min(seconds, key=seconds.__getitem__)
    assert [move.tp_degree for move in moves] == ([best] if best != 2 else [])
    assert current_s(controller, view) == pytest.approx(seconds[2], rel=0.01)
    for degree in (4, 8):
        assert switched_s(controller, view, degree) == pytest.approx(seconds[degree], rel=0.01)


@given(latencies, batches_of_4)
@settings(deadline=None)
def test_not_where_the_gain_is_not_above_the_cost(latency, per_engine):
    view = view_of(2, numbered(per_engine))
    free = paper(latency, 0.0)
    gain_s = current_s(free, view) - min(switched_s(free, view, degree) for degree in (4, 8))
    assume(gain_s > 1e-3)
    assert free.decide(view)
    assert paper(latency, gain_s * 0.99).decide(view)
    assert not paper(latency, gain_s * 1.01).decide(view)


@given(latencies, wakes_s, batches_of_4, st.booleans())
@settings(deadline=None)
def test_every_move_is_forecast_to_pay(latency, wake_s, per_engine, foresees):
    """A controller that does not consider later moments makes every switch that pays."""
    waits = {"wait_shares": (1 / 8, 1 / 2)} if foresees else {}
    controller, view = paper(latency, wake_s, **waits), view_of(2, numbered(per_engine))
    moves = controller.decide(view)
    best = min((4, 8), key=lambda degree: switched_s(controller, view, degree))
    pays = switched_s(controller, view, best) < current_s(controller, view)
    assert pays or not moves
    assert moves or foresees or not pays
    assert [(move.pool, move.tp_degree) for move in moves] in ([], [(POOL.index, best)])


def test_a_switch_counts_until_it_is_made():
    """Requests have 100 tokens left, and saving takes as long as 80 of them. The switch would pay
    at once, but not after saving."""
    latency = ShardedLatency(exchange_s=0.0, exchange_each_s=0.0)
    view = view_of(2, numbered([[LONGEST - 100] * 4, [], [], []]))
    costs = costs_on_a40(latency, wake_s=0.0, kv="move", link_bytes_per_s=3.1e8)
    batch = [float(PROMPT_TOKENS + LONGEST - 100)] * 4
    load_s = costs.move_s(2, 8, [batch], [batch])
    at_once = replace(costs, link_bytes_per_s=math.inf, wake_s=load_s)
    counted, paying = (paper(latency, 0.0, costs=of) for of in (costs, at_once))
    left_s = current_s(counted, view)
    assert 0.75 * left_s < costs.ahead_s(2, [batch]) < 0.85 * left_s
    assert switched_s(paying, view, 8) < 0.5 * left_s
    assert [move.tp_degree for move in paying.decide(view)] == [8]
    assert counted.decide(view) == []


def test_reshape_has_no_effect_without_remaining_requests():
    view = view_of(2, numbered([[LONGEST - 2], [], [], []]))
    costs = costs_on_a40(SHARDED, wake_s=0.0, link_bytes_per_s=1e8)
    controller = paper(SHARDED, 0.0, costs=costs)
    look = controller.reshaping.look(POOL, controller.outlook.forecast(view))
    assert look.gain(8, move_kv=True) == 0.0
    assert look.gain(8, move_kv=False) != 0.0


class LongOrDone:
    """Predicts the maximum length or one token, by scenario."""

    is_known = True

    def tokens(self, generated, scenario=0.0):
        return dict.fromkeys(generated, 1.0 if scenario else float(LONGEST))


def test_scenarios_without_remaining_requests_gain_nothing():
    """No request is left in some scenarios. On average the switch still pays."""
    costs = costs_on_a40(SHARDED, wake_s=0.0, kv="move", link_bytes_per_s=3e8)
    controller = paper(SHARDED, 0.0, costs=costs, remaining=LongOrDone())
    view = view_of(2, {0: {0: 9}})
    done = controller.outlook.forecast(view, 1 / 3)
    assert controller.reshaping.look(POOL, done).gain(4, move_kv=True) == 0.0
    (move,) = controller.decide(view)
    assert move.tp_degree == 4


def test_of_equal_times_the_present_layout():
    """The machine is equally fast at all TP degrees, and switches are free. The control: a machine
    slightly faster at TP 8 makes it switch."""
    costs = costs_on_a40(wake_s=0.0, kv_bytes_per_token=0.0, kv="move")
    same = paper(LinearLatency(), 0.0, costs=costs)
    view = view_of(2, {0: {0: 1}})
    assert same.decide(view) == []
    assert switched_s(same, view, 4) == switched_s(same, view, 8) == current_s(same, view)
    (move,) = paper(FasterAtTP8(), 0.0, costs=costs).decide(view)
    assert move.tp_degree == 8


class FasterAtTP8(LinearLatency):
    def decode_s(self, tp_degree, batch, context_tokens):
        gain = 1e-9 if tp_degree == 8 else 0.0
        return super().decode_s(tp_degree, batch, context_tokens) - gain


def test_uniform_lengths_never_switch():
    """With 128 requests of 2000 tokens on 8 A40, TP 8 is slower until the end."""
    lengths = [2000] * 128
    assert ON_A40.decode_s(8, 128, 128 * 1500) > ON_A40.decode_s(2, 32, 32 * 1500)
    no_tp4 = Pool(0, {2: POOL.engines[2], 8: POOL.engines[8]})
    assert play(switching(lengths, pools=[no_tp4]).decide, lengths).switches == []
    # Negative control: with few requests it switches.
    few = switching(lengths[:3], pools=[no_tp4])
    assert [tp for _, tp in play(few.decide, lengths[:3]).switches] == [8]


@pytest.mark.parametrize("seed", [0, 1])
def test_as_good_as_the_best_switch_in_hindsight(seed):
    lengths = long_tailed(128, seed)
    never_s = play(lambda _: [], lengths).seconds
    played = play(switching(lengths).decide, lengths)
    best_s = min(
        play(switch_at(at_s, tp), lengths).seconds
        for tp in (4, 8)
        for at_s in range(0, int(never_s), 16)
    )
    assert played.seconds < 0.9 * never_s
    assert played.seconds < 1.01 * best_s


def test_a_switch_that_pays_is_put_off_while_waiting_is_better():
    """With known lengths a switch pays from the start, but TP 8 is still slower then."""
    lengths = long_tailed(128, 1)
    begun = play(switching(lengths, wait_shares=()).decide, lengths)
    put_off = play(switching(lengths).decide, lengths)
    assert begun.switches[0][0] < put_off.switches[0][0]
    assert put_off.seconds < 0.97 * begun.seconds


@dataclass(frozen=True)
class MeasuredTo(ShardedLatency):
    """Measured only up to `most_tokens` (TP degree, context tokens) at some TP degrees."""

    most_tokens: tuple[tuple[int, float], ...] = ()

    def reaches(self, tp_degree, batch, context_tokens):
        assert batch >= 1
        return context_tokens <= dict(self.most_tokens).get(tp_degree, math.inf)


ALL_TOKENS = PROMPT_TOKENS + LONGEST


@pytest.mark.parametrize(
    ("most_tokens", "chosen"),
    [
        ({}, [4]),
        ({2: ALL_TOKENS, 4: ALL_TOKENS, 8: ALL_TOKENS}, [4]),
        ({4: ALL_TOKENS - 1}, [8]),
        ({4: ALL_TOKENS - 1, 8: ALL_TOKENS - 1}, []),
        ({2: ALL_TOKENS - 1}, []),
    ],
)
def test_reshaping_needs_a_profile_of_both_degrees(most_tokens, chosen):
    """The profile must reach the final context at both the present and the new TP degree."""
    latency = MeasuredTo(most_tokens=tuple(most_tokens.items()))
    controller = paper(latency, wake_s=0.01)
    moves = controller.decide(view_of(2, numbered([[10], [], [], []])))
    assert [move.tp_degree for move in moves] == chosen


def test_the_maximum_switches_in_one_direction():
    lengths = long_tailed(64, 2)
    up = play(switching(remaining=Maximum(16_000), wait_shares=()).decide, lengths)
    assert [tp for _, tp in up.switches] == [4, 8]


def test_a_lower_degree_is_not_looked_at():
    """TP 2 would be faster for many requests."""
    crowd = view_of(8, {0: dict.fromkeys(range(100), 10)})
    controller = paper(SHARDED, 0.0)
    assert switched_s(controller, crowd, 2) < current_s(controller, crowd)
    assert controller.decide(crowd) == []


def test_drafting_counts():
    """With three times the tokens per step, too little is left for a switch to pay."""
    setting = DraftSetting("small", 4)
    view = view_of(2, {0: {0: 0}})

    def drafted(progress: DraftProgress) -> RolloutView:
        told = replace(view.engines[0], drafting={request(0): progress})
        return replace(view, engines=(told, *view.engines[1:]))

    p = token_acceptance(4, 0.5)
    told = DraftProgress(setting, 1000, 500, round(500 / p - 500))
    free, drafting = paper(SHARDED, 0.0), drafted(told)
    plain_s, fast_s = current_s(free, view), current_s(paper(SHARDED, 0.0), drafting)
    # A pass yields 1 + 0.5 * 4 tokens and takes a fifth longer.
    assert fast_s == pytest.approx(plain_s * 1.2 / 3, rel=0.01)
    gain_s = plain_s - min(switched_s(free, view, degree) for degree in (4, 8))
    assert paper(SHARDED, gain_s * 0.9).decide(view)
    assert not paper(SHARDED, gain_s * 0.9).decide(drafting)
    expected = {"small": round(p, 2)}

    def known(view: RolloutView) -> float:
        by_default = paper(SHARDED, 0.0, default_drafting=setting, expected_acceptance=expected)
        return current_s(by_default, view)

    assert known(view) == pytest.approx(fast_s)
    assert known(drafted(DraftProgress(None))) == pytest.approx(plain_s)
    assert known(drafted(DraftProgress(setting))) == pytest.approx(fast_s)


def test_a_raced_request_counts_once():
    controller = paper(SHARDED, 0.0)
    views = [view_of(2, on) for on in ({0: {0: 50}}, {0: {0: 50}, 1: {0: 20}}, {3: {0: 50}})]
    alone_s, raced_s, elsewhere_s = (switched_s(controller, view, 8) for view in views)
    assert alone_s == pytest.approx(raced_s) == elsewhere_s
    assert len({tuple(paper(SHARDED, 0.0).decide(view)) for view in views}) == 1


def test_only_pools_that_are_all_there():
    pools = [POOL, OTHER_POOL]
    other = tuple(EngineView(e, {request(90): 5}, tp_degree=2) for e in (7, 8))
    view = view_of(2, {0: {0: 1}})
    both = replace(view, engines=(*view.engines, *other))
    assert [move.pool for move in paper(SHARDED, 0.0, pools=pools).decide(both)] == [0, 1]
    lacking = replace(view, engines=(*view.engines[1:], *other))
    assert [move.pool for move in paper(SHARDED, 0.0, pools=pools).decide(lacking)] == [1]
    assert paper(SHARDED, 0.0).decide(view_of(2, {})) == []
    assert paper(SHARDED, 0.0).decide(view_of(8, {0: {0: 1}})) == []
    alone = Pool(0, {2: POOL.engines[2]})
    assert paper(SHARDED, 0.0, pools=[alone]).decide(view) == []


@pytest.mark.parametrize("kv", ["move", "recompute"])
def test_move_states_whether_kv_moves(kv):
    costs = costs_on_a40(SHARDED, wake_s=0.0, kv=kv)
    (move,) = paper(SHARDED, 0.0, costs=costs).decide(view_of(2, {0: {0: 100}}))
    assert move == Reshape(POOL.index, move.tp_degree, kv == "move")


def test_deciding_is_cheap():
    lengths = long_tailed(256, 3)
    view = view_of(2, {e: dict.fromkeys(range(e, 256, 4), 9) for e in range(4)})
    looks_s = []
    for _ in range(5):
        controller = switching(lengths)
        looks_s.append(_cpu_s(controller, view))
    again_s = min(_cpu_s(controller, view) for _ in range(5))
    assert min(looks_s) < 0.1
    assert again_s < 1e-3


def _cpu_s(controller: Controller, view: RolloutView) -> float:
    began_s = time.process_time()
    controller.decide(view)
    return time.process_time() - began_s
