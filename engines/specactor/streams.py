"""Both ends of a stream of draft tokens for one request (SpecActor, section 4.1). Pure.

    DraftStream (drafter)                       VerifyStream (verifier)
    one live sequence, whose tokens ── Drafted ──►  pending, verified as it has arrived
    are told one by one             ◄── Verified ── what each step has emitted

The drafter has at most 2w - 1 tokens that are not verified yet, w being the window, so a failure
wastes no more ("the drafter only wastes a maximum of 2w - 1 tokens"). Coupled, it has at most w and
rests while they are verified. The verifier waits in neither case: it verifies what has arrived, and
decodes plainly where nothing has.

Each end finds out for itself that a draft was wrong, by comparing it with what was emitted, so
nothing is said about it. What was drafted before the drafter knew arrives late and is recognised by
`num_verified`. Positions count tokens from the start of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
import numpy as np

from schemas.counts import StreamCounts

NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Part of what is sent: without names, as there is one for each token."""


class Opened(_Message, frozen=True):
    """Begin to draft for a request, or go on with another setting."""

    id: str
    token_ids: list[int]
    """Tokens of prompt and response so far."""
    sample_key: int
    window: int
    """Draft tokens per verification, at least 1."""
    coupled: bool
    """Whether drafting rests while a window is verified."""
    max_tokens: int
    """Tokens of prompt and response, at most."""


class Verified(_Message, frozen=True):
    """Tokens that a step of the verifier has emitted."""

    id: str
    start: int
    """Position of the first."""
    token_ids: list[int]


class Drafted(_Message, frozen=True):
    """Tokens that the drafter expects next."""

    id: str
    num_verified: NonNegative
    """Tokens of the request that it knew to be right."""
    start: NonNegative
    """Position of the first draft token."""
    token_ids: list[NonNegative]


class SetBack(NamedTuple):
    """How a drafter's sequence has to change, which had gone another way than the response."""

    keep: int
    """Tokens of it that stay, from the start of the prompt."""
    token_ids: list[int]
    """Tokens that follow them."""


@dataclass(slots=True)
class DraftStream:
    """State of one request at the drafter's end."""

    opened: Opened
    counts: StreamCounts
    num_verified: int = field(init=False)
    """Tokens of prompt and response that are known to be right."""
    ahead: list[int] = field(default_factory=list)
    """Tokens drafted after these, and not known to be right."""
    ended: bool = False
    """Whether the last of `ahead` ends the response."""
    limit: int = field(init=False)
    """Tokens ahead, at most."""

    def __post_init__(self) -> None:
        self.num_verified, window = len(self.opened.token_ids), self.opened.window
        self.limit = window if self.opened.coupled else 2 * window - 1

    @property
    def wants(self) -> bool:
        """Whether its next token is to be drafted now."""
        num_ahead = len(self.ahead)
        return not self.ended and num_ahead < self.limit and num_ahead < self.room

    @property
    def room(self) -> int:
        """Tokens that may be drafted after those that are right. A verification emits one more."""
        return self.opened.max_tokens - 1 - self.num_verified

    def drafted(self, token_id: int, ended: bool) -> Drafted:
        """Take the next token; what the verifier is told. `ended`: it ends the response."""
        assert self.wants
        start = self.num_verified + len(self.ahead)
        self.ahead.append(token_id)
        self.ended = ended
        self.counts.num_drafted += 1
        return Drafted(self.opened.id, self.num_verified, start, [token_id])

    def follows(self, told: Verified) -> bool:
        """Whether this is what it has to hear next."""
        return told.start == self.num_verified

    def verified(self, told: Verified) -> SetBack | None:
        """Take what was emitted; None where the sequence goes on as it is."""
        assert self.follows(told), f"{told.start} after {self.num_verified} tokens"
        agree, num_ahead = agreeing(told.token_ids, self.ahead), len(self.ahead)
        self.num_verified += len(told.token_ids)
        if agree == len(told.token_ids):
            del self.ahead[:agree]
            self.ended = self.ended and bool(self.ahead)
            return None
        # It was wrong, or the verifier is beyond it.
        self._waste(num_ahead - agree)
        self.ahead, self.ended = [], False
        return SetBack(told.start + agree, told.token_ids[agree:])

    def close(self) -> None:
        """The response is there, or is drafted for elsewhere."""
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
    """State of one request at the verifier's end."""

    num_tokens: int
    """Tokens of the request."""
    pending: list[int] = field(default_factory=list)
    """Draft tokens that come next."""
    corrected_at: int = 0
    """Tokens up to and with the one in whose place a draft last proved wrong."""

    def advance(self, emitted: Sequence[int]) -> None:
        """Take in further tokens of the request."""
        start = self.num_tokens
        self.num_tokens += len(emitted)
        agree = agreeing(emitted, self.pending)
        if agree < min(len(emitted), len(self.pending)):
            self._correct(start + agree)
        else:
            self.pending = self.pending[agree:]

    def receive(self, told: Drafted, text: np.ndarray) -> None:
        """Take what was drafted; `text`: int [any], the request's tokens so far, at least."""
        if told.num_verified < self.corrected_at:
            return
        level = self.num_tokens - told.start
        if level >= 0 and not self.pending:
            # It decoded without these while they were under way.
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
    """Length of the common prefix."""
    num = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        num += 1
    return num
