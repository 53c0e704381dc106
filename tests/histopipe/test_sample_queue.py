"""Which waiting samples engines take, and what they expect of them."""

import math
from dataclasses import replace

import pytest

from refrain.engines.histopipe.engine_load import peak_tokens
from refrain.engines.histopipe.group_lengths import DEFERRED_MEDIANS, GroupLengths
from refrain.engines.histopipe.sample_queue import EngineLimits, SampleQueue
from refrain.engines.histopipe.step_end import StepPace, TokenTimes
from refrain.engines.rollout.moves import Close, EngineView, Migrate, RolloutView, Start
from refrain.schemas.rollout import LengthHistory, RequestId, RolloutRequest, Split
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.010, 1e-4, 0.0, prefill_step_s=0.0)
"""A token takes 10 ms, and 0.1 ms more for each request."""
LIMIT = 16384
GROUP = 4


def requests(**prompts):
    """{prompt: samples}, with prompts of 100 tokens."""
    ids = [RequestId(Split.TRAIN, 1, key, i) for key, num in prompts.items() for i in range(num)]
    return {id: RolloutRequest(id, (0,) * 100, 0, LIMIT) for id in ids}


def lengths_of(known, group_size=GROUP, limit=LIMIT, waits_s=None, observed=None):
    """{prompt: tokens}, {prompt: seconds in which it waits for its environment}, {prompt: tokens
    that it observes for each sampled one}."""
    waits_s, observed = waits_s or {}, observed or {}
    history = {
        key: LengthHistory(n, round(1.1 * n), n, 1.0, waits_s.get(key, 0.0), observed.get(key, 0.0))
        for key, n in known.items()
        if n
    }
    return GroupLengths(list(known), history, group_size, limit)


def queue_of(known, num_engines=2, max_num_seqs=64, held=math.inf, staleness=1, **given):
    times = TokenTimes(LATENCY, 1, max_num_seqs)
    pace = StepPace(times, num_engines, staleness, train_s=0.0)
    lengths = lengths_of(known, **given)
    return SampleQueue(lengths, EngineLimits(LATENCY, times, 1, held), pace)


def view_of(waiting, *progress, finished=(), now_s=0.0):
    engines = tuple(EngineView(i, own) for i, own in enumerate(progress))
    return RolloutView(0.0, engines, 0, 0, waiting=waiting, finished=dict(finished), now_s=now_s)


def started(moves, engine):
    return [m.id.prompt_key for m in moves if isinstance(m, Start) and m.to_engine == engine]


def test_longest_go_first_and_have_few_beside_them():
    known = {"long": 10000, "short": 100, "middle": 1000}
    waiting = requests(short=60, long=4, middle=20)
    moves = queue_of(known, num_engines=3, max_num_seqs=32).decide(view_of(waiting, {}, {}, {}))
    first, second = started(moves, 0), started(moves, 1)
    assert first[:4] == ["long"] * 4
    assert set(second) == {"short"}
    assert len(first) < len(second) <= 32


@pytest.mark.parametrize(("wait_s", "first"), [(0.0, "b"), (1.0, "b"), (2.0, "a")])
def test_conversations_that_wait_long_go_first(wait_s, first):
    """Waiting 1 s is worth less than 100 tokens of 10.8 ms, waiting 2 s is worth more."""
    queue = queue_of({"a": 900, "b": 1000}, 1, 8, waits_s={"a": wait_s})
    assert started(queue.decide(view_of(requests(a=4, b=4), {})), 0)[0] == first


def test_a_prompt_without_history_waits_as_long_as_others():
    lengths = lengths_of({"a": 9, "b": 9, "c": 9, "new": 0}, waits_s={"a": 2.0, "b": 4.0, "c": 9.0})
    assert lengths.wait_s("new") == 4.0


def test_waits_take_no_room_in_the_kv_cache_but_time():
    def num_started(**options):
        queue = queue_of({"a": 1000}, num_engines=1, **options)
        return len(queue.decide(view_of(requests(a=8), {})))

    waits_s = {"a": 1000.0}
    assert num_started(held=3 * 1110) == num_started(held=3 * 1110, waits_s=waits_s) == 3
    assert num_started() == num_started(waits_s=waits_s) == 8


def test_an_engine_takes_no_more_than_its_kv_cache_will_hold():
    waiting = requests(a=8)
    queue = queue_of({"a": 1000}, num_engines=1, held=3 * 1110)
    assert started(queue.decide(view_of(waiting, {})), 0) == ["a"] * 3


def test_observed_tokens_take_room_in_the_kv_cache():
    """Two tokens are observed for each sampled one: a sample has 100 + 3 * 1000 tokens in the end.
    One that has sampled 500 has 100 + 3 * 500 now."""
    queue = queue_of({"a": 1000}, num_engines=1, held=4 * 1110, observed={"a": 2.0})
    assert started(queue.decide(view_of(requests(a=8), {})), 0) == ["a"]
    running = dict.fromkeys(requests(a=2), 500)
    load = queue._load(EngineView(0, running))
    assert load.context == [1600.0, 1600.0]
    assert load.context_each() == pytest.approx(1600 + 3 * 500 / 2)
    assert queue._mean_given(requests(a=2)) == pytest.approx(100 + 2 * 1000 / 2)


def test_a_prompt_without_history_observes_as_much_as_others():
    known, observed = {"a": 9, "b": 9, "c": 9, "new": 0}, {"a": 0.5, "b": 1.0, "c": 9.0}
    lengths = lengths_of(known, observed=observed)
    assert lengths.context_per_token("new") == 2.0
    assert lengths.observed_tokens("new") == lengths.tokens("new")
    assert lengths.context_per_token("unknown") == lengths_of(known).context_per_token("a") == 1.0


def test_a_sample_that_fits_nowhere_starts_on_an_empty_engine():
    queue = queue_of({"a": 1000}, num_engines=1, held=10)
    assert started(queue.decide(view_of(requests(a=2), {})), 0) == ["a"]


def test_the_forecast_of_the_kv_cache_counts_requests_until_they_end():
    assert peak_tokens([100, 50], [10, 1000]) == 50 + 1000
    assert peak_tokens([100, 50], [10, 10]) == 100 + 50 + 2 * 10
    assert peak_tokens([100, 50], [10, 10], [3.0, 1.0]) == 100 + 50 + 4 * 10
    assert peak_tokens([100, 50], [10, 1000], [3.0, 0.5]) == 50 + 500
    assert peak_tokens([], []) == 0.0


def test_places_that_are_free_are_filled_together():
    waiting = requests(a=50)
    queue = queue_of({"a": 1000}, num_engines=1, max_num_seqs=32)
    ids = [move.id for move in queue.decide(view_of(waiting, {}))]
    assert len(ids) == 32
    left = {id: r for id, r in waiting.items() if id not in ids}
    running = dict.fromkeys(ids[1:], 500)
    assert queue.decide(view_of(left, running, finished={ids[0]: 1000})) == []
    running = dict.fromkeys(ids[2:], 500)
    ended = dict.fromkeys(ids[:2], 1000)
    assert len(queue.decide(view_of(left, running, finished=ended))) == 2


def test_siblings_go_where_their_prefix_is_if_that_costs_less_than_the_prefill(monkeypatch):
    known = {"a": 1000, "b": 1001}
    waiting = requests(a=2, b=2)
    running = {RequestId(Split.TRAIN, 1, "a", 9): 0}

    def first(prefill_s):
        monkeypatch.setattr(LinearLatency, "prefill_s", lambda *_: prefill_s)
        queue = queue_of(known, num_engines=1)
        queue._known.prompts["a"] = 100
        return started(queue.decide(view_of(waiting, running)), 0)[0]

    assert first(prefill_s=1.0) == "a"
    assert first(prefill_s=0.001) == "b"


def test_finished_siblings_move_a_group_forward():
    known = {"a": 500, "b": 1000, "c": 700}
    lengths = lengths_of(known)
    lengths.drift = 0.3
    ended = {RequestId(Split.TRAIN, 1, "a", i): 8000 for i in range(8, 16)}
    queue = queue_of(known, num_engines=1, max_num_seqs=4)
    moves = queue.decide(view_of(requests(a=4, b=4), {}, finished=ended))
    assert started(moves, 0)[0] == "a"
    assert started(queue_of(known).decide(view_of(requests(a=4, b=4), {})), 0)[0] == "b"


def test_unknown_groups_count_as_the_typical_one_and_trust_siblings_sooner():
    lengths = lengths_of({"a": 100, "b": 1000, "c": 10000, "new": None})
    assert lengths.tokens("new") == pytest.approx(1000, rel=0.01)
    for key in ("b", "new"):
        lengths.add(key, 4000)
    assert lengths.tokens("b") < lengths.tokens("new") < 4000


def test_nothing_is_expected_beyond_the_maximum():
    lengths = lengths_of({"a": 900, "b": 10}, limit=1000)
    assert lengths.tokens("a") <= 1000
    assert lengths.most_remaining("a", 990) == 10
    assert lengths.remaining("a", 995) == 5
    assert lengths.remaining("b", 500) > 1


def test_samples_that_have_outgrown_their_group_or_are_deferred_may_go_on_for_long():
    lengths = lengths_of({"a": 1000, "b": 1200}, limit=100_000)

    def medians(num_tokens, **deferred):
        most = lengths.most_remaining("a", num_tokens, **deferred)
        return most / lengths.remaining("a", num_tokens)

    assert medians(100) == pytest.approx(lengths.margin)
    # Without memory, half of the others end within each median.
    assert 0.5 ** medians(3000) == 0.25
    assert medians(100, deferred=True) == pytest.approx(DEFERRED_MEDIANS * lengths.margin)
    assert 0.5**DEFERRED_MEDIANS < 1 / 500


def test_an_engine_with_a_deferred_sample_takes_fewer_others():
    known = {"a": 1000, "b": 1000}

    def num_taken(sample_index):
        before, queue = queue_of(known, num_engines=1), None
        queue = SampleQueue(lengths_of(known), before._limits, before._pace, before)
        running = {RequestId(Split.TRAIN, 1, "a", sample_index): 1500}
        return len(started(queue.decide(view_of(requests(b=60), running)), 0))

    assert 0 < num_taken(-1) < num_taken(0)


def test_requests_that_end_last_move_to_an_empty_engine():
    queue = queue_of({"a": 100, "b": 4000}, num_engines=2)
    queue._known.prompts |= {"a": 100, "b": 100}
    short = {RequestId(Split.TRAIN, 1, "a", i): 50 for i in range(50)}
    long = {RequestId(Split.TRAIN, 1, "b", i): 0 for i in range(2)}
    moves = queue.decide(view_of({}, short | long, {}))
    assert set(moves) == {Migrate(id, 1) for id in long}
    assert queue.decide(view_of({}, long, short)) == []


def test_a_longer_staleness_gives_engines_more_time():
    times = TokenTimes(LATENCY, 1, 64)
    lengths = [10000.0] * 4 + [500.0] * 200

    def seconds(staleness, train_s=10.0):
        return StepPace(times, 4, staleness, train_s).rollout_s(lengths, 100.0)

    assert seconds(0) < seconds(1) < seconds(2)
    assert seconds(1, train_s=1000.0) == 1000.0
    assert seconds(0) > 10000 * 0.010


def test_requests_in_flight_keep_the_time_in_which_they_should_end():
    """The engine takes fewer samples of the next step beside those that must end soon."""
    before = queue_of({"old": 4000}, num_engines=1)
    old = requests(old=4)
    before.decide(view_of(old, {}))
    end_s = before._known.ends_s[0]

    def num_started(now_s, earlier):
        limits, times = before._limits, before._limits.times
        queue = SampleQueue(lengths_of({"a": 1000}), limits, StepPace(times, 1, 1, 0.0), before)
        waiting = {
            replace(id, step=2): replace(r, id=replace(id, step=2))
            for id, r in requests(a=64).items()
        }
        engines = (EngineView(0, {}, earlier=dict.fromkeys(earlier, 2000)),)
        view = RolloutView(0.0, engines, 0, 64, waiting=waiting, now_s=now_s)
        return len(started(queue.decide(view), 0))

    hurried_s = end_s - 2200 * LATENCY.decode_s(1, 12, 0.0)
    alone, relaxed, hurried = (
        num_started(0.0, ()),
        num_started(0.0, old),
        num_started(hurried_s, old),
    )
    assert 0 < hurried < relaxed < alone
    before._known.ends_s[0] = math.inf
    assert num_started(hurried_s, old) > hurried


@pytest.mark.parametrize(
    ("num_finished", "num_deferrable", "waits", "closes"),
    [(9, 1, False, True), (8, 1, False, False), (9, 0, False, False), (9, 1, True, False)],
    ids=["full", "not yet", "the next step is not queued", "a sample waits"],
)
def test_a_step_closes_when_its_batch_is_full(num_finished, num_deferrable, waits, closes):
    queue, engines = queue_of({"a": 1000}), (EngineView(0, dict.fromkeys(requests(a=1), 5)),)
    waiting = requests(a=1) if waits else {}
    view = RolloutView(0.0, engines, num_finished, 10, num_deferrable, waiting)
    assert (queue.decide(view) == [Close()]) is closes


def test_deferred_requests_are_expected_to_be_as_long_as_their_own_groups():
    """The engine takes fewer samples beside one that will take long."""
    before = queue_of({"old": 8000, "brief": 10}, num_engines=1)
    before.decide(view_of(requests(old=1, brief=1), {}))

    def num_started(*carried):
        limits, times = before._limits, before._limits.times
        queue = SampleQueue(lengths_of({"a": 1000}), limits, StepPace(times, 1, 1, 0.0), before)
        running = {RequestId(Split.TRAIN, 2, key, -1): 100 for key in carried}
        # The first look fixes when the engine should end.
        queue.decide(view_of(requests(a=40), {}))
        return len(started(queue.decide(view_of(requests(a=40), running)), 0))

    assert num_started("old") < num_started("brief")
    assert num_started("unknown") > 0
    finished = {RequestId(Split.TRAIN, 2, "unknown", -1): 100}
    queue_of({"a": 1000}).decide(view_of(requests(a=1), {}, finished=finished))
