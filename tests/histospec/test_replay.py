"""The replay counts the same as slow token-by-token references, and as the drafter of an engine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.benchmarks.drafters import Shipped, Windows, index_of
from refrain.benchmarks.lockstep import Batch, generate_again
from refrain.engines.histospec.acceptance import Acceptance
from refrain.engines.histospec.drafting import draft_batch, without_noise, without_turns
from refrain.engines.histospec.gate import LOOKS, Gate
from refrain.engines.histospec.index import build_index
from refrain.engines.histospec.library import PromptHistory
from refrain.engines.histospec.matching import NO_INDEX, IndexTable
from refrain.engines.histospec.replay import replay
from refrain.engines.histospec.window import AIMD, Doubling, Fixed
from refrain.engines.simulate.history import PAPER
from refrain.schemas.drafting import DraftingConfig
from tests.histospec.test_gate import Linear
from tests.histospec.test_index import slow_draft

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=25)


def slow_replay(prompt, response, history, policy):
    context, left = list(prompt), list(response)
    windows = policy.first(1)
    passes = verifications = num_drafted = num_accepted = 0
    while left:
        window = min(int(windows[0]), len(left) - 1)
        drafted = slow_draft(prompt, history, context, window, 3, 7) if history else []
        accepted = 0
        while accepted < len(drafted) and drafted[accepted] == left[accepted]:
            accepted += 1
        passes += 1
        verifications += bool(drafted)
        num_drafted += len(drafted)
        num_accepted += accepted
        windows = policy.next(windows, np.array([len(drafted)]), np.array([accepted]))
        context += left[: accepted + 1]
        left = left[accepted + 1 :]
    return passes, verifications, num_drafted, num_accepted


@settings(max_examples=150, deadline=None)
@given(
    prompt=TOKENS,
    history=st.lists(st.tuples(TOKENS, st.sampled_from([0.0, 1.0])), max_size=3),
    responses=st.lists(TOKENS, min_size=1, max_size=3),
    policy=st.sampled_from([AIMD(), Doubling(start=3, cap=8)]),
)
def test_replay_equals_token_by_token(prompt, history, responses, policy):
    table = IndexTable()
    texts, rewards = [t for t, _ in history], [r for _, r in history]
    slot = table.add(build_index(prompt, texts, rewards)) if history else NO_INDEX
    slots = np.full(len(responses), slot, np.int32)
    got = replay([prompt] * len(responses), responses, table.rows, slots, policy)
    expected = [slow_replay(prompt, response, history, policy) for response in responses]
    counts = (got.num_passes, got.num_verifications, got.num_drafted, got.num_accepted)
    assert list(zip(*(c.tolist() for c in counts), strict=True)) == expected


class SlowRow:
    """One response of a batch. The gate decides for the whole batch."""

    def __init__(self, prompt, response, slot, policy):
        self.context, self.left, self.slot = list(prompt), list(response), slot
        self.policy, self.windows = policy, policy.first(1)
        self.counts = [0, 0, 0, 0]

    def draft(self, table, worth):
        self.drafts = np.zeros((1, self.policy.cap), np.int32)
        self.evidence = np.zeros((1, self.policy.cap), np.uint16)
        window = np.minimum(self.windows, len(self.left) - 1).astype(np.int32)
        args = np.array([self.slot], np.int32), np.array([self.context], np.int32)
        at = np.array([len(self.context)], np.int32)
        args = (*args, at, window, without_noise(1), without_turns(1), worth)
        return draft_batch(table, *args, self.drafts, self.evidence)[0]

    def verify(self, kept):
        accepted = 0
        while accepted < kept and self.drafts[0, accepted] == self.left[accepted]:
            accepted += 1
        passed = (1, int(kept > 0), int(kept), accepted)
        self.counts = [old + new for old, new in zip(self.counts, passed, strict=True)]
        self.windows = self.policy.next(self.windows, np.array([kept]), np.array([accepted]))
        self.context += self.left[: accepted + 1]
        self.left = self.left[accepted + 1 :]
        return accepted


def slow_gated_replay(rows, table, gate, acceptance):
    while live := [row for row in rows if row.left]:
        kept = np.zeros(len(live), np.int32)
        has_index = any(row.slot != NO_INDEX for row in live)
        if looked := has_index and gate.looks(len(live)):
            drafted = np.array([row.draft(table, acceptance.worth) for row in live], np.int32)
            evidence = np.concatenate([row.evidence for row in live])
            context_tokens = float(sum(len(row.context) for row in live))
            known = (context_tokens, acceptance.num_observed)
            kept = gate.keep(acceptance.of_drafts(evidence, drafted), drafted, *known)
        accepted = [row.verify(n) for row, n in zip(live, kept, strict=True)]
        if looked:
            acceptance.observe(evidence, kept, np.array(accepted))
    return [tuple(row.counts) for row in rows]


class LinearInContext(Linear):
    def step_s(self, batch, context_tokens, num_rows, num_tokens):
        return super().step_s(batch, 0.0, num_rows, num_tokens) + 0.05 * context_tokens


@settings(max_examples=150, deadline=None)
@given(
    prompt=TOKENS,
    history=st.lists(st.tuples(TOKENS, st.sampled_from([0.0, 1.0])), min_size=1, max_size=3),
    responses=st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=4),
    policy=st.sampled_from([Fixed(6), AIMD(), Doubling(start=3, cap=8)]),
    times=st.builds(
        LinearInContext,
        token=st.sampled_from([0.0, 0.2, 0.6, 2.0]),
        drafting=st.sampled_from([0.0, 0.2]),
    ),
)
def test_with_a_gate_it_equals_row_by_row(prompt, history, responses, policy, times):
    """Verified tokens, the state of the gate and the learnt acceptance all agree."""
    table = IndexTable()
    slot = table.add(build_index(prompt, [t for t, _ in history], [r for _, r in history]))
    slots = [slot if indexed else NO_INDEX for _, indexed in responses]
    texts = [tokens for tokens, _ in responses]
    gate, acceptance, slow_gate, learnt = Gate(times), Acceptance(), Gate(times), Acceptance()
    got = replay(
        [prompt] * len(texts),
        texts,
        table.rows,
        np.array(slots, np.int32),
        policy,
        gate=gate,
        acceptance=acceptance,
    )
    rows = [SlowRow(prompt, text, slot, policy) for text, slot in zip(texts, slots, strict=True)]
    expected = slow_gated_replay(rows, table.rows, slow_gate, learnt)
    counts = (got.num_passes, got.num_verifications, got.num_drafted, got.num_accepted)
    assert list(zip(*(c.tolist() for c in counts), strict=True)) == expected
    assert gate == slow_gate
    assert acceptance.by_class.tolist() == learnt.by_class.tolist()


def again(num_rows, gate=None):
    """Replay the known answer of 41 tokens in `num_rows` rows at once."""
    prompt, answer = [9, 8, 7], list(range(10, 51))
    table = IndexTable()
    slots = np.full(num_rows, table.add(build_index(prompt, [answer], [1.0])), np.int32)
    args = ([prompt] * num_rows, [answer] * num_rows, table.rows, slots, Fixed(8))
    return replay(*args, gate=gate)


def test_where_nothing_pays_nothing_is_verified_and_soon_not_even_drafted():
    gate = Gate(Linear(token=1.5))
    assert again(3, gate).num_drafted.tolist() == [0, 0, 0]
    assert LOOKS <= gate.backoff.num_closed < 41 - LOOKS


@settings(max_examples=150, deadline=None)
@given(
    prompt=TOKENS,
    history=st.lists(TOKENS, max_size=3),
    responses=st.lists(TOKENS, min_size=1, max_size=3),
    policy=st.sampled_from([AIMD(), Doubling(start=3, cap=8)]),
)
def test_lockstep_equals_the_replay(prompt, history, responses, policy):
    table, arrays = IndexTable(), [np.array(tokens, np.int32) for tokens in (prompt, *responses)]
    rewards = [float(i) for i in range(len(history))]
    index = build_index(prompt, history, rewards, max_draft=policy.cap)
    slots = np.full(len(responses), table.add(index) if history else NO_INDEX, np.int32)
    expected = replay([prompt] * len(responses), responses, table.rows, slots, policy)
    past = {"a": PromptHistory("a", 1, arrays[0], history, rewards)} if history else {}
    batch = Batch({"a": arrays[0]}, ["a"] * len(responses), arrays[1:], past)
    got = generate_again(batch, Windows(policy, PAPER))
    assert got.num_passes == expected.num_passes.sum()
    assert got.num_drafted == expected.num_drafted.sum()
    assert got.num_accepted == expected.num_accepted.sum()


@pytest.mark.parametrize("token", [0.0, 0.3, 0.8, 2.0])
def test_shipped_drafter_equals_the_replay(token, tmp_path):
    """Five prompts have four samples each. A fifth of their tokens differ from the history, and one
    prompt has no history."""
    rng, table, config = np.random.default_rng(1), IndexTable(), DraftingConfig()
    past, prompts, keys, responses = {}, {}, [], []
    for key in "abcde":
        prompts[key] = rng.integers(0, 50, 4, np.int32)
        answer = rng.integers(0, 50, 80, np.int32)
        samples = [np.where(rng.random(80) < 0.2, 99, answer)[: 20 + 15 * i] for i in range(8)]
        samples = [sample.astype(np.int32) for sample in samples]
        past[key] = PromptHistory(key, 1, prompts[key], samples[:4], [0.0, 1.0, 0.0, 1.0])
        keys += [key] * 4
        responses += samples[4:]
    past.pop("e")
    batch = Batch(prompts, keys, responses, past)
    slots = {key: table.add(index_of(batch, key, config, config.max_draft)) for key in past}
    expected = replay(
        [prompts[key] for key in keys],
        responses,
        table.rows,
        np.array([slots.get(key, NO_INDEX) for key in keys], np.int32),
        Fixed(config.max_draft),
        gate=Gate(Linear(token=token)),
        acceptance=Acceptance(),
    )
    got = generate_again(batch, Shipped(config, Linear(token=token), len(keys), tmp_path))
    assert got.num_passes == expected.num_passes.sum()
    assert got.num_drafted == expected.num_drafted.sum()
    assert got.num_accepted == expected.num_accepted.sum()
