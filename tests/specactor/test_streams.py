"""The two ends of a stream of draft tokens agree, whatever the order of messages and steps."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.specactor.streams import (
    Drafted,
    DraftStream,
    Opened,
    SetBack,
    Verified,
    VerifyStream,
)
from refrain.schemas.counts import StreamCounts

PROMPT = [7, 8, 9]


@dataclass
class Session:
    """One request: the model's response, the drafter's guesses, and the messages under way."""

    response: list[int]
    window: int
    coupled: bool
    acceptance: float
    rng: Random
    counts: StreamCounts = field(default_factory=StreamCounts)
    num_accepted: int = 0
    num_verified: int = 0
    num_steps: int = 0
    most_unverified: int = 0

    def __post_init__(self) -> None:
        opened = Opened("r", PROMPT, 0, self.window, self.coupled, len(PROMPT) + len(self.response))
        self.drafter = DraftStream(opened, self.counts)
        self.verifier = VerifyStream(len(PROMPT))
        self.to_drafter: deque[Verified] = deque()
        self.to_verifier: deque[Drafted] = deque()
        self.text = list(PROMPT)
        self.sequence = list(PROMPT)
        """The drafter's copy of the text. Corrections cut it back. It is never sent as a whole."""

    @property
    def done(self) -> bool:
        return len(self.text) == len(PROMPT) + len(self.response)

    def right(self, position: int) -> int:
        return self.response[position - len(PROMPT)]

    def draft(self) -> int:
        """Return the right token with probability `acceptance`, or -1. After an error, return
        -1."""
        so_far = self.sequence == [*PROMPT, *self.response][: len(self.sequence)]
        return (
            self.right(len(self.sequence)) if so_far and self.rng.random() < self.acceptance else -1
        )

    def step(self) -> None:
        """Take a step of the verifier: emit the accepted prefix of the pending drafts and one token
        more."""
        while self.to_verifier and self.rng.random() < 0.7:
            self.verifier.receive(self.to_verifier.popleft(), np.array(self.text))
        room = len(PROMPT) + len(self.response) - len(self.text) - 1
        drafts = self.verifier.pending[: min(self.window, room)]
        emitted = [self.right(len(self.text))]
        for draft in drafts:
            if draft != emitted[-1]:
                break
            emitted.append(self.right(len(self.text) + len(emitted)))
        self.num_accepted += len(emitted) - 1
        self.num_verified += len(drafts)
        self.num_steps += 1
        self.to_drafter.append(Verified("r", len(self.text), emitted))
        self.text += emitted
        self.verifier.advance(emitted)

    def draft_on(self) -> None:
        """Let the drafter's side take its next action, if there is one."""
        if self.to_drafter and self.rng.random() < 0.5:
            if back := self.drafter.verified(self.to_drafter.popleft()):
                self.sequence[back.keep :] = back.token_ids
        elif self.drafter.wants:
            self.sequence.append(self.draft())
            self.to_verifier.append(self.drafter.drafted(self.sequence[-1], ended=False))
        known = [*PROMPT, *self.response][: self.drafter.num_verified]
        assert self.sequence == [*known, *self.drafter.ahead]
        self.most_unverified = max(self.most_unverified, len(self.drafter.ahead))

    def run(self) -> None:
        for _ in range(200 * (len(self.response) + 1)):
            if self.done:
                self.drafter.close()
                return
            self.step() if self.rng.random() < 0.3 else self.draft_on()
        raise AssertionError("no end")


def session(window: int, coupled: bool, acceptance: float, seed: int = 0, n: int = 60) -> Session:
    return Session(list(range(100, 100 + n)), window, coupled, acceptance, Random(seed))


@given(
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    st.integers(0, 10**6),
    st.integers(1, 60),
)
def test_every_token_is_the_models_and_a_failure_wastes_little(window, coupled, p, seed, n):
    one = session(window, coupled, p, seed, n)
    one.run()
    assert one.text == PROMPT + one.response
    assert one.counts.max_wasted <= 2 * window - 1
    assert one.most_unverified <= (window if coupled else 2 * window - 1)
    assert one.counts.num_drafted >= one.num_accepted


@pytest.mark.parametrize("coupled", [True, False])
def test_right_drafts_are_never_thrown_away(coupled):
    for seed in range(50):
        one = session(4, coupled, acceptance=1.0, seed=seed)
        one.run()
        assert one.num_accepted == one.num_verified
        assert one.counts.num_failures <= 1  # Only past the end.


@pytest.mark.parametrize(("coupled", "ahead"), [(False, 5), (True, 3)])
def test_each_token_is_streamed_within_the_limit(coupled, ahead):
    """A decoupled drafter drafts the next tokens while the verifier checks the last window."""
    one = session(3, coupled, acceptance=1.0)
    for _ in range(20):
        one.draft_on()
    told = [Drafted("r", 3, 3 + i, [100 + i]) for i in range(ahead)]
    assert list(one.to_verifier) == told


def test_messages_do_not_grow_with_the_text():
    one = session(3, coupled=False, acceptance=0.8, n=500)
    most = [0, 0]
    for _ in range(5000):
        one.step() if one.rng.random() < 0.3 and not one.done else one.draft_on()
        sizes = (len(t.token_ids) for wire in (one.to_drafter, one.to_verifier) for t in wire)
        half = len(one.text) > 250
        most[half] = max(most[half], *sizes, 0)
    assert one.done
    assert most == [4, 4]


def test_the_worst_failure_wastes_two_windows_less_one():
    one = session(3, coupled=False, acceptance=0.0)
    for _ in range(20):
        one.draft_on()
    assert one.drafter.verified(Verified("r", 3, [100])) == SetBack(3, [100])
    assert one.counts.max_wasted == 5


def test_overtaken_drafter_continues_at_the_verifier():
    stream = DraftStream(Opened("r", PROMPT, 0, 3, False, 100), StreamCounts())
    stream.drafted(1, ended=False)
    assert stream.verified(Verified("r", 3, [1, 2, 3])) == SetBack(4, [2, 3])
    assert stream.counts.num_failures == 0
    assert stream.drafted(4, ended=False) == Drafted("r", 6, 6, [4])


def test_drafts_made_before_a_rejection_are_dropped():
    stream = VerifyStream(3)
    stream.receive(Drafted("r", 3, 3, [1, 2]), np.array(PROMPT))
    stream.advance([5])
    # The drafter sent these before it knew of the 5. By chance they fit the length of the text now.
    stream.advance([6])
    stream.receive(Drafted("r", 3, 5, [3, 4]), np.array([*PROMPT, 5, 6]))
    assert stream.pending == []
    stream.receive(Drafted("r", 5, 5, [8]), np.array([*PROMPT, 5, 6]))
    assert stream.pending == [8]


def test_drafts_that_come_late_count_from_where_the_request_is():
    stream = VerifyStream(3)
    stream.advance([1, 2])
    stream.receive(Drafted("r", 3, 3, [1, 2, 3, 4]), np.array([*PROMPT, 1, 2]))
    assert stream.pending == [3, 4]


def test_draft_that_knew_the_rejection_is_used():
    stream = VerifyStream(3)
    stream.advance([5, 6, 7])
    stream.receive(Drafted("r", 3, 3, [1]), np.array([*PROMPT, 5, 6, 7]))
    stream.receive(Drafted("r", 3, 6, [2]), np.array([*PROMPT, 5, 6, 7]))
    assert stream.pending == []
    # The drafter knew of the 5 alone.
    stream.receive(Drafted("r", 4, 6, [8]), np.array([*PROMPT, 5, 6, 7]))
    assert stream.pending == [8]


def test_nothing_is_drafted_after_the_end():
    stream = DraftStream(Opened("r", PROMPT, 0, 2, False, 100), StreamCounts())
    stream.drafted(0, ended=True)
    assert not stream.wants
    stream.verified(Verified("r", 3, [9]))
    assert stream.wants
    # The verifier decides whether a token was the end.
    stream.drafted(0, ended=True)
    stream.verified(Verified("r", 4, [0]))
    assert stream.wants


def test_drafts_stay_within_the_token_limit():
    """The verifier itself makes the last token of a response."""
    stream = DraftStream(Opened("r", PROMPT, 0, 4, False, 6), StreamCounts())
    assert stream.room == 2
    stream.drafted(1, ended=False)
    stream.drafted(2, ended=False)
    assert not stream.wants
