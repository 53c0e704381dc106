"""One request on an engine, and how its tokens grow from step to step. Pure.

A decoding step yields one token. A step that drafts w tokens yields `1 + p + ... + p^w` of them,
the expectation of `engines.latency.speedup`, every time: a fluid in place of a random walk. One
that drafts from history yields the mean of the replay (`engines.simulate.history`). What is whole
of it has been generated; the fraction is carried to the next step.

Deviations: the acceptance p of a trace is a share, accepted over drafted tokens, taken here as the
probability that a draft token is accepted when those before it were. With windows beyond 1 the
share is the smaller of the two, since what follows a rejection counts as drafted, so gains are
underestimated. The last step drafts a whole window, though the response may end within it. From
history neither is so: tokens and windows are real, and their sums are exact; but they are spread
evenly over the response, where an engine has them in bursts, and more of them in the small batches
at the end, where the gate lets them pass.
"""

import math
from dataclasses import dataclass

from engines.latency.speedup import expected_tokens
from schemas.rollout import DraftSetting, RolloutRequest

PARTS = 1 << 32
"""Of a token, counted as integers: sums over a batch are exact, in whatever order they are made."""
HISTOSPEC = "histospec"
"""The drafter whose every pass is known by a replay."""


@dataclass(frozen=True, slots=True)
class Passes:
    """What some decode steps of a request are together; any part of them has its share of it."""

    num_passes: int
    """At least 1."""
    num_tokens: float
    """That they yield; whole from a replay, an expectation from an acceptance."""
    num_verifications: int = 0
    num_draft_tokens: int = 0

    @property
    def rate(self) -> int:
        """Parts of a token that a step yields; up, so that ten steps of 1.1 tokens are 11."""
        return int(-(-self.num_tokens * PARTS // self.num_passes))

    @property
    def window(self) -> int:
        """Mean draft tokens of a step, in parts of a token."""
        return self.num_draft_tokens * PARTS // self.num_passes


DECODING = Passes(1, 1)


@dataclass(slots=True)
class Member:
    """While it runs it has `done` tokens, and those of `steps - joined` steps at its rate."""

    request: RolloutRequest
    length: int
    """Response tokens it will have."""
    done: int
    """Response tokens when it last joined the batch."""
    submitted_s: float
    acceptance: float = 0.0
    """Probability that a draft token is accepted."""
    replayed: Passes = DECODING
    """Its decode steps when it is drafted for from history."""
    joined: int | None = None
    """Decode steps of the engine when it joined; None while it waits."""
    finished_s: float = math.inf
    passes: Passes = DECODING
    """What its decode steps are like now."""
    rate: int = PARTS
    """Of `passes`."""
    carried: int = 0
    """Parts of the next token when it last joined the batch."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verifications: int = 0
    """These three since it was submitted, until it last left the batch."""

    def draft(self, setting: DraftSetting | None) -> None:
        """Go on so; not while it runs. Raises ValueError when p is not in [0, 1]."""
        if setting is None:
            self.passes = DECODING
        elif setting.drafter == HISTOSPEC:
            self.passes = self.replayed
        else:
            num_tokens = expected_tokens(setting.window, self.acceptance)
            self.passes = Passes(1, num_tokens, 1, setting.window)
        self.rate = self.passes.rate

    def leave(self, steps: int) -> None:
        """Count what it has after so many steps; it runs no longer.

        Accepted tokens and steps are together the whole tokens of the steps that drafted.
        """
        assert self.joined is not None
        tokens, ran, passes = self.tokens(steps), steps - self.joined, self.passes
        if passes.num_draft_tokens:
            self.num_draft_tokens += ran * passes.num_draft_tokens // passes.num_passes
            self.num_accepted_tokens += tokens - self.done - ran
            self.num_verifications += ran * passes.num_verifications // passes.num_passes
        self.carried = (self.carried + self.rate * ran) % PARTS
        self.done, self.joined = tokens, None

    def tokens(self, steps: int) -> int:
        """Whole response tokens after so many decode steps of the engine."""
        if self.joined is None or steps <= self.joined:
            return self.done
        gained = (self.carried + self.rate * (steps - self.joined)) // PARTS
        return min(self.length, self.done + gained)

    def context(self, steps: int) -> int:
        return len(self.request.prompt_token_ids) + self.tokens(steps)

    def context_parts(self, steps: int) -> int:
        """Context tokens in parts, the fraction included."""
        ran = 0 if self.joined is None else steps - self.joined
        prompt = len(self.request.prompt_token_ids)
        return (prompt + self.done) * PARTS + self.carried + self.rate * ran

    @property
    def steps_left(self) -> int:
        """Steps from when it joined to the first at whose end it has its length."""
        return -((self.carried - (self.length - self.done) * PARTS) // self.rate)
