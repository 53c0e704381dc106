"""A batch that jumps over steps agrees with one that goes token by token."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.simulate.batching import SimulatedRequest, VirtualBatch
from refrain.schemas.rollout import RequestId, RolloutRequest, Split
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01, 1e-4, 1e-6, prefill_token_s=1e-5)


def member(name, length, prompt_tokens=10):
    id = RequestId(Split.TRAIN, 1, str(name), 0)
    return SimulatedRequest(RolloutRequest(id, (0,) * prompt_tokens, 0, length + 1), length, 0, 0.0)


def batch_of(max_num_seqs=4, max_context_tokens=None):
    return VirtualBatch(1, LATENCY, max_num_seqs, max_context_tokens)


def finish(batch):
    batch.advance(1e9)
    return {m.request.id.prompt_key: m.finished_s for m in batch.finished}


def token_by_token(arrivals, max_num_seqs):
    """Return finish times, step by step, of arrivals (time, name, prompt tokens, length)."""
    arrivals, waiting, running, now, ends = sorted(arrivals), [], {}, 0.0, {}
    while arrivals or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now + 1e-12:
            waiting.append(arrivals.pop(0)[1:])
        joining = waiting[: max_num_seqs - len(running)]
        if joining:
            waiting = waiting[len(joining) :]
            rms = (sum(prompt**2 for _, prompt, _ in joining) / len(joining)) ** 0.5
            now += LATENCY.prefill_s(1, len(joining), rms)
            running |= {name: [prompt + 1, length - 1] for name, prompt, length in joining}
        else:
            now += LATENCY.decode_s(1, len(running), sum(c for c, _ in running.values()))
            running = {name: [c + 1, left - 1] for name, (c, left) in running.items()}
        done = [name for name, (_, left) in running.items() if left == 0]
        for name in done:
            del running[name]
            ends[name] = now
    return ends


lengths = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 60)), min_size=1, max_size=12)


@given(lengths, st.integers(1, 5))
def test_jumps_are_as_steps(requests, max_num_seqs):
    batch = batch_of(max_num_seqs)
    named = [(f"{i:02}", length, prompt) for i, (length, prompt) in enumerate(requests)]
    batch.add([member(*request) for request in named], 0.0)
    slow = token_by_token([(0.0, i, p, n) for i, n, p in named], max_num_seqs)
    assert finish(batch) == pytest.approx(slow)


@given(lengths, st.lists(st.floats(1e-3, 2.0), min_size=12, max_size=12))
def test_arrivals_join_at_the_end_of_a_step(requests, gaps):
    batch, now, arrivals = batch_of(), 0.0, []
    for i, (length, prompt) in enumerate(requests):
        now += gaps[i]
        arrivals.append((now, str(i), prompt, length))
        batch.add([member(i, length, prompt)], now)
    assert finish(batch) == pytest.approx(token_by_token(arrivals, 4))


def test_looking_changes_nothing():
    looked, plain = batch_of(), batch_of()
    for batch in (looked, plain):
        batch.add([member(i, 50 + 7 * i) for i in range(9)], 0.0)
    for i in range(1000):
        looked.advance(i * 0.01)
        looked.steps_at(i * 0.01)
    assert finish(looked) == finish(plain)


def test_leaving_request_keeps_its_tokens():
    batch = batch_of()
    batch.add([member("stays", 100), member("leaves", 100)], 0.0)
    id = RequestId(Split.TRAIN, 1, "leaves", 0)
    removed, free_s = batch.remove([id], 0.5)
    assert 0.5 <= free_s <= 0.5 + 0.011
    prefill_s = LATENCY.prefill_s(1, 2, 10)
    steps = [LATENCY.decode_s(1, 2, 22 + 2 * i) for i in range(removed[0].done - 1)]
    assert prefill_s + sum(steps) == pytest.approx(free_s)
    assert removed[0].joined is None
    assert finish(batch).keys() == {"stays"}


def test_request_leaving_during_prefill_has_no_tokens():
    batch = batch_of()
    batch.add([member(i, 10) for i in range(6)], 0.0)
    ids = [RequestId(Split.TRAIN, 1, str(i), 0) for i in (0, 5)]
    removed, free_s = batch.remove(ids, 1e-3)
    assert [m.done for m in removed] == [0, 0]
    assert free_s == 1e-3
    assert finish(batch).keys() == {"1", "2", "3", "4"}


def test_a_full_cache_sends_the_youngest_back():
    rng = random.Random(0)
    requests = [(i, rng.randrange(20, 80)) for i in range(12)]
    free, tight = batch_of(12), batch_of(12, 200)
    for batch in (free, tight):
        batch.add([member(i, length) for i, length in requests], 0.0)
    assert len(finish(free)) == len(finish(tight)) == 12
    assert tight.num_preempted > 0
    assert free.num_preempted == 0
    assert finish(tight)["0"] < finish(tight)["11"]
    assert tight.finished[-1].finished_s > free.finished[-1].finished_s


def test_the_cache_never_overflows():
    batch = batch_of(12, 200)
    batch.add([member(i, 20 + 5 * i) for i in range(12)], 0.0)
    for i in range(2000):
        batch.advance(i * 0.005)
        contexts = [batch.find(id).context(batch.steps_at(i * 0.005)) for id in batch.ids()]
        joined = [batch.find(id).joined is not None for id in batch.ids()]
        assert sum(c for c, j in zip(contexts, joined, strict=True) if j) <= 200


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="needs 310 tokens of KV cache, but an engine has 200"):
        batch_of(4, 200).add([member(0, 300)], 0.0)
