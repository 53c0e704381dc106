"""Both ends of a stream of draft tokens for one request (SpecActor, section 4.1). Pure.

    DraftStream (drafter)                       VerifyStream (verifier)
    one live sequence; each new    ── Drafted ──►  pending drafts, verified as they have
    token is sent at once          ◄── Verified ── arrived; each step's tokens are sent back

The drafter has at most 2w - 1 unverified tokens, with w the window. So a failure wastes no more
than that ("the drafter only wastes a maximum of 2w - 1 tokens"). When coupled, the drafter has at
most w and rests while they are verified. The verifier never waits: it verifies what has arrived,
and decodes plainly if nothing has.

Each end compares drafts with emitted tokens and so finds wrong drafts by itself. No message reports
them. Drafts that were sent before the drafter knew arrive late. The verifier recognises them by
`num_verified`. Positions count tokens from the start of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from refrain.schemas.counts import StreamCounts

NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the messages. Without field names, because there is one message per token."""


class Opened(_Message, frozen=True):
    """Message to start drafting for a request, or to continue with another setting."""

    id: str
    token_ids: list[int]
    """Prompt and response tokens so far."""
    sample_key: int
    window: int
    """Draft tokens per verification, at least 1."""
    coupled: bool
    """Whether drafting rests while a window is verified."""
    max_tokens: int
    """Most tokens of prompt and response."""


class Verified(_Message, frozen=True):
    """Tokens that one step of the verifier emitted."""

    id: str
    start: int
    """Position of the first token."""
    token_ids: list[int]


class Drafted(_Message, frozen=True):
    """Tokens that the drafter expects next."""

    id: str
    num_verified: NonNegative
    """Tokens of the request that the drafter knew to be right."""
    start: NonNegative
    """Position of the first draft token."""
    token_ids: list[NonNegative]


class SetBack(NamedTuple):
    """Change that brings a drafter's sequence back to the response."""

    keep: int
    """Tokens to keep, from the start of the prompt."""
    token_ids: list[int]
    """Tokens to append after them."""


@dataclass(slots=True)
class DraftStream:
    """The drafter's state of one request."""

    opened: Opened
    counts: StreamCounts
    num_verified: int = field(init=False)
    """Prompt and response tokens known to be right."""
    ahead: list[int] = field(default_factory=list)
    """Tokens drafted after these, not known to be right."""
    ended: bool = False
    """Whether the last of `ahead` ends the response."""
    limit: int = field(init=False)
    """Most tokens ahead."""

    def __post_init__(self) -> None:
        self.num_verified, window = len(self.opened.token_ids), self.opened.window
        self.limit = window if self.opened.coupled else 2 * window - 1

    @property
    def wants(self) -> bool:
        """Whether to draft its next token now."""
        num_ahead = len(self.ahead)
        return not self.ended and num_ahead < self.limit and num_ahead < self.room

    @property
    def room(self) -> int:
        """Tokens that may be drafted after the right ones. A verification emits one more."""
        return self.opened.max_tokens - 1 - self.num_verified

    def drafted(self, token_id: int, ended: bool) -> Drafted:
        """Add the drafted token and return the message to the verifier. `ended`: it ends the
        response."""
        assert self.wants
        start = self.num_verified + len(self.ahead)
        self.ahead.append(token_id)
        self.ended = ended
        self.counts.num_drafted += 1
        return Drafted(self.opened.id, self.num_verified, start, [token_id])

    def follows(self, told: Verified) -> bool:
        """Return whether this message is the next one."""
        return told.start == self.num_verified

    def verified(self, told: Verified) -> SetBack | None:
        """Take the emitted tokens. Return None if the drafter's sequence agrees with them."""
        assert self.follows(told), f"{told.start} after {self.num_verified} tokens"
        agree, num_ahead = agreeing(told.token_ids, self.ahead), len(self.ahead)
        self.num_verified += len(told.token_ids)
        if agree == len(told.token_ids):
            del self.ahead[:agree]
            self.ended = self.ended and bool(self.ahead)
            return None
        # A draft was wrong, or the verifier is ahead of the drafter.
        self._waste(num_ahead - agree)
        self.ahead, self.ended = [], False
        return SetBack(told.start + agree, told.token_ids[agree:])

    def close(self) -> None:
        """End the stream: the response is finished, or another drafter takes over."""
        self._waste(len(self.ahead))
        self.ahead = []

    def _waste(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        assert num_tokens <= 2 * self.opened.window - 1, f"{num_tokens} wasted at once"
        self.counts.num_failures += 1
        self.counts.num_wasted += num_tokens
        self.counts.max_wasted = max(self.counts.max_wasted, num_tokens)


@dataclass(slots=True)
class VerifyStream:
    """The verifier's state of one request."""

    num_tokens: int
    """Tokens of the request."""
    pending: list[int] = field(default_factory=list)
    """Draft tokens that come next."""
    corrected_at: int = 0
    """Tokens up to and including the last one that replaced a wrong draft."""

    def advance(self, emitted: Sequence[int]) -> None:
        """Add emitted tokens of the request."""
        start = self.num_tokens
        self.num_tokens += len(emitted)
        agree = agreeing(emitted, self.pending)
        if agree < min(len(emitted), len(self.pending)):
            self._correct(start + agree)
        else:
            self.pending = self.pending[agree:]

    def receive(self, told: Drafted, text: np.ndarray) -> None:
        """Take drafts. `text`: int [any], at least the request's tokens so far."""
        if told.num_verified < self.corrected_at:
            return
        level = self.num_tokens - told.start
        if level >= 0 and not self.pending:
            # The verifier decoded plainly while these drafts were under way.
            past = text[told.start : self.num_tokens].tolist()
            agree = agreeing(past, told.token_ids)
            if agree < min(len(past), len(told.token_ids)):
                self._correct(told.start + agree)
            else:
                self.pending = told.token_ids[level:]
        elif told.start == self.num_tokens + len(self.pending):
            self.pending = [*self.pending, *told.token_ids]

    def _correct(self, position: int) -> None:
        self.pending, self.corrected_at = [], position + 1


def agreeing(some: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    num = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        num += 1
    return num
