"""Both ends of a stream of draft tokens for one request (SpecActor, section 4.1). Pure.

    DraftStream (drafter)                      VerifyStream (verifier)
    drafts a window, and the next ── Drafted ──►  pending, verified as it has arrived
    one while that is verified    ◄── Verified ── what each step has emitted

The drafter has at most 2w - 1 tokens that are not verified yet, w being the window, so a failure
wastes no more ("the drafter only wastes a maximum of 2w - 1 tokens"). Coupled, it drafts one window
for each answer and waits: the same code with a barrier.

Each end finds out for itself that a draft was wrong, by comparing it with what was emitted, so
nothing is said about it. What was drafted before the drafter knew arrives late and is recognised by
`num_verified`. Positions count tokens from the start of the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from schemas.counts import StreamCounts

NonNegative = Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Opened:
    """Begin to draft for a request, or go on with another setting."""

    id: str
    token_ids: list[int]
    """Tokens of prompt and response so far."""
    sample_key: int
    window: int
    """Draft tokens per verification, at least 1."""
    coupled: bool
    max_tokens: int
    """Tokens of prompt and response, at most."""


@dataclass(frozen=True, slots=True)
class Verified:
    """Tokens that a step of the verifier has emitted."""

    id: str
    start: int
    """Position of the first."""
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Drafted:
    """Tokens that the drafter expects next."""

    id: str
    num_verified: NonNegative
    """Tokens of the request that it knew to be right."""
    start: NonNegative
    """Position of the first draft token."""
    token_ids: list[NonNegative]


@dataclass(slots=True)
class DraftStream:
    """State of one request at the drafter's end."""

    opened: Opened
    counts: StreamCounts
    text: list[int] = field(init=False)
    """Tokens that are known to be right."""
    ahead: list[int] = field(default_factory=list)
    """Tokens drafted from `start` on, and not known to be right."""
    start: int = field(init=False)
    in_flight: int = 0
    """Tokens being drafted after `ahead`."""
    ended: bool = False
    """Whether the last of `ahead` ends the response."""
    answered: bool = False
    """Whether it has answered since it last heard of the verifier."""

    def __post_init__(self) -> None:
        self.text = list(self.opened.token_ids)
        self.start = len(self.text)

    @property
    def next_draft(self) -> int | None:
        """Tokens to draft now; 0: an empty answer is due; None: nothing to do."""
        window, coupled = self.opened.window, self.opened.coupled
        if self.in_flight or (coupled and self.answered):
            return None
        room = self.opened.max_tokens - 1 - (self.start + len(self.ahead))
        limit = min(window, (window if coupled else 2 * window - 1) - len(self.ahead))
        num = 0 if self.ended else max(0, min(room, limit))
        return num if num or coupled else None

    def begin(self, num_tokens: int) -> list[int]:
        """The context to draft so many tokens after."""
        self.in_flight = num_tokens
        return [*self.text[: self.start], *self.ahead]

    def drafted(self, token_ids: Sequence[int], ended: bool) -> Drafted:
        """Take what was drafted; what the verifier has not heard of it yet."""
        assert len(token_ids) <= self.in_flight or not token_ids
        first = self.start + len(self.ahead)
        self.in_flight = 0
        self.answered = True
        self.counts.num_drafted += len(token_ids)
        self.ahead.extend(token_ids)
        self.ended = ended
        known = len(self.text)
        self._settle()
        # Of a draft that is known to be wrong, nothing.
        kept = list(token_ids) if self.start + len(self.ahead) == first + len(token_ids) else []
        return Drafted(self.opened.id, known, first, kept)

    def follows(self, told: Verified) -> bool:
        """Whether this is what it has to hear next."""
        return told.start == len(self.text)

    def verified(self, told: Verified) -> bool:
        """Take what was emitted. Whether what is in flight has become useless."""
        assert self.follows(told), f"{told.start} after {len(self.text)} tokens"
        self.text.extend(told.token_ids)
        self.answered = False
        failed = self._settle()
        # With nothing but what is in flight, it shows when that is there.
        useless = failed and self.in_flight > 0
        if useless:
            self.in_flight = 0
        return useless

    def close(self) -> None:
        """The response is there, or is drafted for elsewhere."""
        self._waste(len(self.ahead) + self.in_flight)
        self.ahead, self.in_flight = [], 0

    def _settle(self) -> bool:
        """Drop what is known to be right from `ahead`, or all of it; whether it was wrong."""
        right = self.text[self.start :]
        overlap = min(len(right), len(self.ahead))
        agree = _agreeing(right, self.ahead)
        if agree < overlap:
            self._waste(len(self.ahead) - agree + self.in_flight)
            self.ahead, self.start, self.ended = [], len(self.text), False
            return True
        self.ahead = self.ahead[overlap:]
        self.start += overlap
        if not self.in_flight:
            # The verifier is ahead, or level.
            self.start = max(self.start, len(self.text))
            self.ended = self.ended and bool(self.ahead)
        return False

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
    """Tokens that it had when a draft last proved wrong."""
    heard_of: int = -1
    """Tokens that the drafter knew when it last said something."""

    def advance(self, emitted: Sequence[int]) -> None:
        """Take in further tokens of the request."""
        self.num_tokens += len(emitted)
        agree = _agreeing(emitted, self.pending)
        if agree < min(len(emitted), len(self.pending)):
            self._correct()
        else:
            self.pending = self.pending[agree:]

    def receive(self, told: Drafted, text: np.ndarray) -> None:
        """Take what was drafted; `text`: int [any], the request's tokens so far, at least."""
        self.heard_of = max(self.heard_of, told.num_verified)
        if told.num_verified < self.corrected_at:
            return
        level = self.num_tokens - told.start
        if level >= 0 and not self.pending:
            # It decoded without these while they were under way.
            past = text[told.start : self.num_tokens].tolist()
            if _agreeing(past, told.token_ids) < min(len(past), len(told.token_ids)):
                self._correct()
            else:
                self.pending = told.token_ids[level:]
        elif told.start == self.num_tokens + len(self.pending):
            self.pending = [*self.pending, *told.token_ids]

    @property
    def awaits(self) -> bool:
        """Whether a coupled drafter has yet to answer."""
        return not self.pending and self.heard_of < self.num_tokens

    def _correct(self) -> None:
        self.pending, self.corrected_at = [], self.num_tokens


def _agreeing(some: Sequence[int], others: Sequence[int]) -> int:
    """Length of the common prefix."""
    num = 0
    for one, other in zip(some, others, strict=False):
        if one != other:
            break
        num += 1
    return num
