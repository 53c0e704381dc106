"""Algorithm 1: against brute force, against the best single switch, and when it must not switch."""

import itertools
import timeit
from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engines.pat.remaining import Maximum
from engines.pat.switch import Stage, Switching, present_layout
from engines.rollout.moves import EngineView, Reshape, RolloutView
from schemas.layout import Pool
from schemas.rollout import DraftProgress, DraftSetting
from tests.pat.stage import (
    ON_A40,
    POOL,
    PROMPT_TOKENS,
    costs_on_a40,
    long_tailed,
    play,
    request,
    stage_of,
    switch_at,
    view_of,
)
from tests.simulate.latencies import LinearLatency

OTHER_POOL = Pool(1, {2: (7, 8), 4: (9,)})


@dataclass(frozen=True)
class ShardedLatency:
    """What a step has to load is shared among t GPUs, and t - 1 exchanges are added."""

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

    def draft_s(self, drafter, batch, window):
        raise AssertionError((drafter, batch, window))


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


def paper_stage(latency, wake_s, **fields) -> Stage:
    costs = costs_on_a40(latency, wake_s=wake_s)
    at = {"remaining": Maximum(LONGEST), "wait_shares": ()}
    return stage_of([], latency, costs, **(at | fields))


def brute_force(latency, costs, per_engine: list[list[int]], tp_degrees) -> dict[int, float]:
    """Seconds by TP degree, the present one without a switch; one step at a time."""
    context = [[PROMPT_TOKENS + num for num in of] for of in per_engine]
    seconds = {2: max(_decode_all(latency, 2, of) for of in context)}
    for tp in tp_degrees:
        loads, targets = [0] * len(POOL.engines[tp]), [[] for _ in POOL.engines[tp]]
        for tokens in sorted(itertools.chain(*context), reverse=True):
            place = loads.index(min(loads))
            loads[place] += tokens
            targets[place].append(tokens)
        state_s = min(
            max(
                latency.prefill_s(tp, len(t), (sum(x * x for x in t) / len(t)) ** 0.5)
                for t in targets
                if t
            ),
            costs.kv_bytes_per_token
            * (max(map(sum, context)) / 2 + max(map(sum, targets)) / tp)
            / costs.link_bytes_per_s,
        )
        remaining_s = max(_decode_all(latency, tp, t) for t in targets)
        seconds[tp] = remaining_s + costs.wake_s + state_s
    return seconds


def _decode_all(latency, tp_degree, contexts: list[int]) -> float:
    seconds, longest = 0.0, PROMPT_TOKENS + LONGEST
    running = list(contexts)
    while running:
        seconds += latency.decode_s(tp_degree, len(running), sum(running) + len(running) / 2)
        running = [tokens + 1 for tokens in running if tokens + 1 < longest]
    return seconds


@given(latencies, wakes_s, batches_of_4)
@settings(deadline=None, max_examples=60)
def test_the_switch_is_that_of_brute_force(latency, wake_s, per_engine):
    stage = paper_stage(latency, wake_s)
    seconds = brute_force(latency, stage.costs, per_engine, (4, 8))
    fastest, second = sorted(seconds.values())[:2]
    assume(second - fastest > 0.01 * second)
    moves = Switching(stage, [POOL]).decide(view_of(2, numbered(per_engine)))
    best = min(seconds, key=seconds.__getitem__)
    assert [move.tp_degree for move in moves] == ([best] if best != 2 else [])
    comparison = stage.compare(POOL, view_of(2, numbered(per_engine)))
    assert comparison.current_s == pytest.approx(seconds[2], rel=0.01)
    for candidate in comparison.candidates:
        assert candidate.seconds == pytest.approx(seconds[candidate.tp_degree], rel=0.01)


@given(latencies, batches_of_4)
@settings(deadline=None)
def test_not_where_the_gain_is_not_above_the_cost(latency, per_engine):
    view = view_of(2, numbered(per_engine))
    free = paper_stage(latency, 0.0)
    gain_s = free.compare(POOL, view).gain_s
    assume(gain_s > 1e-3)
    assert Switching(free, [POOL]).decide(view)
    assert Switching(paper_stage(latency, gain_s * 0.99), [POOL]).decide(view)
    assert not Switching(paper_stage(latency, gain_s * 1.01), [POOL]).decide(view)


@given(latencies, wakes_s, batches_of_4, st.booleans())
@settings(deadline=None)
def test_every_move_is_forecast_to_pay(latency, wake_s, per_engine, foresees):
    waits = {"wait_shares": (1 / 8, 1 / 2)} if foresees else {}
    policy = Switching(paper_stage(latency, wake_s, **waits), [POOL])
    moves = policy.decide(view_of(2, numbered(per_engine)))
    comparison = policy.last[POOL.index]
    best = comparison.best
    assert bool(moves) == (
        best.seconds < comparison.current_s and best.seconds <= comparison.later_s
    )
    assert policy.switches == ([comparison] if moves else [])
    if moves:
        assert moves == [Reshape(POOL.index, best.tp_degree, best.switch.move_kv)]


def test_of_equal_times_the_present_layout():
    """A machine that is as fast at any TP degree, with one request and switches that cost nothing.
    A little faster at TP 8, and it switches."""
    costs = costs_on_a40(wake_s=0.0, kv_bytes_per_token=0.0, kv="move")
    same = stage_of([], LinearLatency(), costs, remaining=Maximum(LONGEST), wait_shares=())
    policy = Switching(same, [POOL])
    assert policy.decide(view_of(2, {0: {0: 1}})) == []
    assert policy.last[0].gain_s == 0.0
    assert policy.last[0].best.tp_degree == 4
    faster = replace(same, latency=FasterAtTP8())
    (move,) = Switching(faster, [POOL]).decide(view_of(2, {0: {0: 1}}))
    assert move.tp_degree == 8


class FasterAtTP8(LinearLatency):
    def decode_s(self, tp_degree, batch, context_tokens):
        gain = 1e-9 if tp_degree == 8 else 0.0
        return super().decode_s(tp_degree, batch, context_tokens) - gain


def test_uniform_lengths_never_switch():
    """128 of 2000 tokens on 8 A40: TP 8 is the slower one until the end."""
    lengths = [2000] * 128
    assert ON_A40.decode_s(8, 128, 128 * 1500) > ON_A40.decode_s(2, 32, 32 * 1500)
    no_tp4 = Pool(0, {2: POOL.engines[2], 8: POOL.engines[8]})
    policy = Switching(stage_of(lengths), [no_tp4])
    assert play(policy.decide, lengths).switches == []
    assert policy.last[0].gain_s < 0
    # The control: a few of them switch at once.
    few = Switching(stage_of(lengths[:3]), [no_tp4])
    assert [tp for _, tp in play(few.decide, lengths[:3]).switches] == [8]


@pytest.mark.parametrize("seed", [0, 1])
def test_as_good_as_the_best_switch_in_hindsight(seed):
    lengths = long_tailed(128, seed)
    never_s = play(lambda _: [], lengths).seconds
    policy = Switching(stage_of(lengths), [POOL])
    played = play(policy.decide, lengths)
    best_s = min(
        play(switch_at(at_s, tp), lengths).seconds
        for tp in (4, 8)
        for at_s in range(0, int(never_s), 16)
    )
    assert played.seconds < 0.9 * never_s
    assert played.seconds < 1.01 * best_s


def test_a_switch_that_pays_is_put_off_while_waiting_is_better():
    """Known lengths make a switch pay from the start, when TP 8 is still the slower one."""
    lengths = long_tailed(128, 1)
    at_once = Switching(stage_of(lengths, wait_shares=()), [POOL])
    later = Switching(stage_of(lengths), [POOL])
    begun, put_off = play(at_once.decide, lengths), play(later.decide, lengths)
    assert begun.switches[0][0] < put_off.switches[0][0]
    assert put_off.seconds < 0.97 * begun.seconds


def test_further_switches_are_foreseen():
    """TP 4 now is worth what TP 8 later makes of it; TP 8 is the last."""
    lengths = long_tailed(128, 1)
    view = view_of(2, {e: dict.fromkeys(range(e, 128, 4), 0) for e in range(4)})
    foresees, does_not = (
        stage_of(lengths, **waits).compare(POOL, view) for waits in ({}, {"wait_shares": ()})
    )
    assert foresees.candidates[0].remaining_s < 0.95 * does_not.candidates[0].remaining_s
    assert foresees.candidates[1] == does_not.candidates[1]
    assert (does_not.best.tp_degree, foresees.best.tp_degree) == (8, 4)
    assert does_not.later_s == float("inf")


def test_several_switches_in_one_stage():
    lengths = long_tailed(128, 0)
    switches = play(Switching(stage_of(lengths), [POOL]).decide, lengths).switches
    assert [tp for _, tp in switches] == [4, 8]


def test_the_maximum_switches_in_one_direction():
    """With lower degrees among the candidates it goes back and forth."""
    lengths = long_tailed(64, 2)
    fields = {"remaining": Maximum(16_000), "wait_shares": ()}
    up = play(Switching(stage_of(lengths, **fields), [POOL]).decide, lengths)
    both = play(Switching(stage_of(lengths, **fields, lower=True), [POOL]).decide, lengths)
    assert [tp for _, tp in up.switches] == [4, 8]
    assert len(both.switches) > 4
    assert up.seconds < both.seconds


def test_a_lower_degree_where_it_is_asked_for():
    crowd = {0: dict.fromkeys(range(200), 10)}
    for lower in (False, True):
        policy = Switching(paper_stage(SHARDED, 0.0, lower=lower), [POOL])
        assert bool(policy.decide(view_of(8, crowd))) == lower


def test_drafting_counts():
    """Three times the tokens a step: what is left is too little for a switch."""
    setting = DraftSetting("small", 4)
    drafted = DraftProgress(setting, 1000, 500)
    view = view_of(2, {0: {0: 0}})
    told = replace(view.engines[0], drafting={request(0): drafted})
    drafting = replace(view, engines=(told, *view.engines[1:]))
    plain, fast = (paper_stage(SHARDED, 0.0).compare(POOL, v) for v in (view, drafting))
    # 1 + 0.5 * 4 tokens a pass, each of which costs a fifth more.
    assert fast.current_s == pytest.approx(plain.current_s * 1.2 / 3, rel=0.01)
    stage = paper_stage(SHARDED, plain.gain_s * 0.9)
    assert Switching(stage, [POOL]).decide(view)
    assert not Switching(stage, [POOL]).decide(drafting)
    by_default = replace(paper_stage(SHARDED, 0.0), default_drafting=(3.0, 4))
    assert by_default.compare(POOL, view).current_s == pytest.approx(fast.current_s)
    off = replace(told, drafting={request(0): DraftProgress(None)})
    undrafted = replace(view, engines=(off, *view.engines[1:]))
    assert by_default.compare(POOL, undrafted).current_s == pytest.approx(plain.current_s)
    new = replace(told, drafting={request(0): DraftProgress(setting)})
    untold = replace(view, engines=(new, *view.engines[1:]))
    assert by_default.compare(POOL, untold).current_s == pytest.approx(fast.current_s)


def test_a_raced_request_counts_once():
    stage = paper_stage(SHARDED, 0.0)
    alone = stage.compare(POOL, view_of(2, {0: {0: 50}}))
    raced = stage.compare(POOL, view_of(2, {0: {0: 50}, 1: {0: 20}}))
    assert raced == alone
    assert stage.compare(POOL, view_of(2, {1: {0: 20}, 3: {0: 50}})) == alone


def test_only_pools_that_are_all_there():
    stage = paper_stage(SHARDED, 0.0)
    policy = Switching(stage, [POOL, OTHER_POOL])
    other = tuple(EngineView(e, {request(90): 5}, tp_degree=2) for e in (7, 8))
    view = view_of(2, {0: {0: 1}})
    both = replace(view, engines=(*view.engines, *other))
    assert [move.pool for move in policy.decide(both)] == [0, 1]
    lacking = replace(view, engines=(*view.engines[1:], *other))
    assert [m.pool for m in Switching(stage, [POOL, OTHER_POOL]).decide(lacking)] == [1]
    assert present_layout(POOL, lacking) is None
    assert present_layout(POOL, RolloutView(0.0, (), 0, 9)) is None
    mixed = replace(view, engines=(*view.engines, EngineView(POOL.engines[8][0], {}, tp_degree=8)))
    assert present_layout(POOL, mixed) is None
    assert [e.engine for e in present_layout(POOL, both)] == list(POOL.engines[2])
    assert stage.compare(POOL, view_of(2, {})) is None
    assert stage.compare(POOL, view_of(8, {0: {0: 1}})) is None
    assert stage.compare(Pool(0, {2: POOL.engines[2]}), view) is None


def test_a_pool_is_looked_at_again_when_something_has_changed():
    """64 requests: 4 must end, or one of them have 128 tokens more, or the layout be another."""
    stage = paper_stage(SHARDED, 100.0)
    policy = Switching(stage, [POOL])
    seen = []

    def looks(tp_degree, num_requests, num_tokens):
        view = view_of(tp_degree, {0: dict.fromkeys(range(num_requests), num_tokens)})
        policy.last.clear()
        policy.decide(view)
        seen.append(bool(policy.last))

    for at in [(2, 64, 0), (2, 64, 127), (2, 61, 127), (2, 60, 127), (2, 60, 130), (2, 60, 255)]:
        looks(*at)
    assert seen == [True, False, False, True, False, True]
    looks(4, 60, 255)
    looks(4, 60, 256)
    assert seen[-2:] == [True, False]
    policy.decide(RolloutView(0.0, (), 0, 9))
    looks(4, 60, 256)
    assert seen[-1]


@pytest.mark.parametrize("kv", ["move", "recompute"])
def test_the_move_says_what_becomes_of_the_kv(kv):
    stage = paper_stage(SHARDED, 0.0)
    stage = replace(stage, costs=replace(stage.costs, kv=kv))
    (move,) = Switching(stage, [POOL]).decide(view_of(2, {0: {0: 100}}))
    assert move.move_kv == (kv == "move")


def test_deciding_is_cheap():
    lengths = long_tailed(256, 3)
    stage = stage_of(lengths, max_num_seqs={2: 64, 4: 128, 8: 256})
    view = view_of(2, {e: dict.fromkeys(range(e, 256, 4), 9) for e in range(4)})
    look_s = min(timeit.repeat(lambda: stage.compare(POOL, view), number=1, repeat=5))
    policy = Switching(stage, [POOL])
    policy.decide(view)
    again_s = min(timeit.repeat(lambda: policy.decide(view), number=10, repeat=5)) / 10
    assert look_s < 0.1
    assert again_s < 1e-3
