"""A drafting batch that jumps over steps agrees with one that goes step by step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.simulate.batching import VirtualBatch
from refrain.engines.simulate.member import SimulatedRequest
from refrain.engines.specactor.ladder import Ladder
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest, Split
from tests.simulate.latencies import LinearLatency

LATENCY = LinearLatency(0.01, 1e-4, 1e-6, prefill_token_s=1e-5)
NGRAM = DraftSetting("ngram", 4)


def id_of(name):
    return RequestId(Split.TRAIN, 1, str(name), 0)


def member(name, length, acceptance, prompt_tokens=10):
    request = RolloutRequest(id_of(name), (0,) * prompt_tokens, 0, length + 1)
    return SimulatedRequest(request, length, 0, 0.0, acceptance)


def batch_of(latency=LATENCY, max_num_seqs=4, max_context_tokens=None, setting=NGRAM):
    batch = VirtualBatch(1, latency, max_num_seqs, max_context_tokens)
    batch.set_drafting(setting, 0.0)
    return batch


def finish(batch):
    """Return (finish time, verifications, draft tokens, accepted tokens) by name."""
    batch.advance(1e9)
    return {
        m.request.id.prompt_key: (
            m.finished_s,
            m.num_verifications,
            m.num_draft_tokens,
            m.num_accepted_tokens,
        )
        for m in batch.finished
    }


class Slow:
    """A request that goes step by step. It counts tokens in floats, which are exact when the
    acceptance is a multiple of 1/8."""

    def __init__(self, name, length, acceptance, prompt_tokens):
        self.name, self.length, self.prompt = name, length, prompt_tokens
        self.acceptance = acceptance
        self.tokens = 0.0
        self.num_passes = self.num_verifications = self.num_draft_tokens = 0

    @property
    def context(self):
        return self.prompt + self.tokens

    def rate(self, setting):
        return sum(self.acceptance**k for k in range(setting.window + 1)) if setting else 1

    def step(self, setting):
        self.tokens += self.rate(setting)
        self.num_passes += 1
        if setting:
            self.num_verifications += 1
            self.num_draft_tokens += setting.window

    def outcome(self, now_s):
        accepted = self.length - self.num_passes
        return now_s, self.num_verifications, self.num_draft_tokens, accepted


class SlowBatch:
    """The rules of `VirtualBatch`, applied one step at a time."""

    def __init__(self, max_num_seqs, capacity):
        self.max_num_seqs, self.capacity = max_num_seqs, capacity
        self.waiting, self.running, self.outcomes = [], [], {}
        self.setting, self.now_s = None, 0.0

    def room(self):
        return self.capacity - sum(m.context + m.rate(self.setting) for m in self.running)

    def run(self, events):
        while events or self.waiting or self.running:
            if not self.waiting and not self.running:
                self.now_s = max(self.now_s, events[0][0])
            while events and events[0][0] <= self.now_s + 1e-9:
                _, what = events.pop(0)
                if isinstance(what, Slow):
                    self.waiting.append(what)
                else:
                    self.setting = what
                    self.make_room()
            if self.waiting or self.running:
                self.step()
        return self.outcomes

    def step(self):
        joining, room = [], self.room()
        while self.waiting and len(self.running) + len(joining) < self.max_num_seqs:
            room -= self.waiting[0].context + 1 + self.waiting[0].rate(self.setting)
            if room < 0 and (self.running or joining):
                break
            joining.append(self.waiting.pop(0))
        if joining:
            rms = (sum(int(m.context) ** 2 for m in joining) / len(joining)) ** 0.5
            self.now_s += LATENCY.prefill_s(1, len(joining), rms)
            for m in joining:
                m.step(None)
            self.running += joining
        else:
            self.now_s += self.step_s(len(self.running), sum(m.context for m in self.running))
            for m in self.running:
                m.step(self.setting)
        for m in [m for m in self.running if m.tokens >= m.length]:
            self.running.remove(m)
            self.outcomes[m.name] = m.outcome(self.now_s)
        self.make_room()

    def step_s(self, batch, context):
        if not self.setting:
            return LATENCY.decode_s(1, batch, context)
        window = self.setting.window
        verify_s = LATENCY.verify_s(1, batch, context, window)
        return verify_s + LATENCY.draft_s(self.setting.drafter, batch, window)

    def make_room(self):
        while len(self.running) > 1 and self.room() < 0:
            self.waiting.insert(0, self.running.pop())


def both(requests, changes, max_num_seqs, capacity):
    """Return the outcomes by jumps, those by steps, and the preemptions. Requests are (gap, length,
    prompt tokens, accepted eighths)."""
    events, now_s = list(changes), 0.0
    for i, (gap, length, prompt, eighths) in enumerate(requests):
        now_s += gap
        events.append((now_s, (f"{i:02}", length, eighths / 8, prompt)))
    events.sort(key=lambda event: event[0])
    fast = VirtualBatch(1, LATENCY, max_num_seqs, capacity)
    slow = SlowBatch(max_num_seqs, capacity or 10**9)
    for at_s, what in events:
        if isinstance(what, tuple):
            fast.add([member(*what)], at_s)
        else:
            fast.set_drafting(what, at_s)
    slow_events = [(s, Slow(*what) if isinstance(what, tuple) else what) for s, what in events]
    return finish(fast), slow.run(slow_events), fast.num_preempted


def same(fast, slow):
    assert fast.keys() == slow.keys()
    assert all(fast[name][1:] == slow[name][1:] for name in fast)
    return [o[0] for o in fast.values()] == pytest.approx([slow[n][0] for n in fast])


requests = st.lists(
    st.tuples(st.floats(1e-3, 1.0), st.integers(1, 100), st.integers(1, 60), st.integers(0, 8)),
    min_size=1,
    max_size=10,
)
changes = st.lists(
    st.tuples(
        st.floats(0.0, 5.0),
        st.none() | st.builds(DraftSetting, st.just("ngram"), st.integers(1, 4)),
    ),
    max_size=5,
)


@settings(deadline=None)
@given(requests, changes, st.integers(1, 5))
def test_jumps_are_as_steps(requests, changes, max_num_seqs):
    fast, slow, _ = both(requests, changes, max_num_seqs, None)
    assert same(fast, slow)


@settings(deadline=None)
@given(requests, changes, st.integers(162, 400))
def test_jumps_are_as_steps_in_a_small_cache(requests, changes, capacity):
    fast, slow, _ = both(requests, changes, 8, capacity)
    assert same(fast, slow)


def test_a_full_cache_preempts_and_is_never_exceeded():
    requests = [(1e-3, 60 + 10 * i, 10, i) for i in range(9)]
    fast, slow, num_preempted = both(requests, [(0.0, NGRAM)], 9, 300)
    assert num_preempted > 0
    assert same(fast, slow)
    batch = batch_of(max_num_seqs=9, max_context_tokens=300)
    batch.add([member(i, 60 + 10 * i, i / 8) for i in range(9)], 0.0)
    for i in range(1000):
        batch.advance(i * 0.005)
        members = [batch.find(id) for id in batch.ids()]
        steps = batch.steps_at(i * 0.005)
        assert sum(m.context(steps) for m in members if m.joined is not None) <= 300


def test_drafting_may_begin_while_another_request_joins():
    """The prefill ends before any request must leave. Then the youngest leave first."""
    for i in range(60):
        joins_s = 0.03 + i * 0.01
        requests = [(1e-3, 100, 10, 8), (1e-3, 100, 10, 8), (joins_s, 100, 1, 8)]
        fast, slow, _ = both(requests, [(joins_s + 0.014, NGRAM)], 9, 111)
        assert same(fast, slow)


@pytest.mark.parametrize("acceptance", [0.1, 0.37, 0.8, 1.0])
@pytest.mark.parametrize("window", [1, 3, 8])
def test_single_request_gains_the_predicted_speedup(acceptance, window):
    latency = LinearLatency(0.01, 1e-4)

    def decoding_s(setting):
        batch = batch_of(latency, setting=setting)
        batch.add([member("a", 10_001, acceptance)], 0.0)
        return finish(batch)["a"][0] - latency.prefill_s(1, 1, 10)

    speedup = Ladder(latency, 1, ("ngram",), 10.0).speedup("ngram", acceptance, 1, window)
    measured = decoding_s(None) / decoding_s(DraftSetting("ngram", window))
    # The last step drafts past the end: it wastes up to `window` of 10,000 tokens.
    assert speedup * (1 - (window + 1) / 10_000) <= measured <= speedup * (1 + 1e-9)


def test_looking_changes_nothing():
    looked, plain = batch_of(), batch_of()
    for batch in (looked, plain):
        batch.add([member(i, 50 + 7 * i, i / 9) for i in range(9)], 0.0)
    for i in range(1000):
        looked.advance(i * 0.01)
        looked.steps_at(i * 0.01)
    assert finish(looked) == finish(plain)


@given(st.floats(0.0, 1.0), st.floats(0.011, 0.5), st.integers(1, 6))
def test_leaving_requests_have_whole_tokens_and_counts(acceptance, at_s, window):
    batch = batch_of(setting=DraftSetting("ngram", window))
    batch.add([member("stays", 900, 0.5), member("leaves", 900, acceptance)], 0.0)
    (removed,), free_s = batch.remove([id_of("leaves")], at_s)
    steps = removed.num_verifications
    assert removed.done == 1 + steps + removed.num_accepted_tokens
    assert removed.num_draft_tokens == window * steps
    gained = sum(acceptance**k for k in range(window + 1)) * steps
    assert removed.done - 1 == pytest.approx(gained - 0.5, abs=0.5 + 1e-6)
    assert at_s <= free_s <= at_s + 0.02
    assert finish(batch).keys() == {"stays"}


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_that_drafts_nothing_is_refused(window):
    with pytest.raises(ValueError, match=f"a draft window is at least 1, not {window}: None"):
        batch_of(setting=DraftSetting("ngram", window))
