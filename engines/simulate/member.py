"""One request on an engine, and how its tokens grow from step to step. Pure.

A decoding step yields one token. A step that drafts w tokens yields `1 + p + ... + p^w` of them,
the expectation of `engines.latency.speedup`, every time: a fluid in place of a random walk. What
is whole of it has been generated; the fraction is carried to the next step.

Deviations: the acceptance p of a trace is a share, accepted over drafted tokens, taken here as the
probability that a draft token is accepted when those before it were. With windows beyond 1 the
share is the smaller of the two, since what follows a rejection counts as drafted, so gains are
underestimated. The last step drafts a whole window, though the response may end within it.
"""

import math
from dataclasses import dataclass

from engines.latency.speedup import expected_tokens
from schemas.rollout import RolloutRequest

PARTS = 1 << 32
"""Of a token, counted as integers: sums over a batch are exact, in whatever order they are made."""


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
    joined: int | None = None
    """Decode steps of the engine when it joined; None while it waits."""
    finished_s: float = math.inf
    rate: int = PARTS
    """Parts of a token that a step yields."""
    window: int = 0
    """Draft tokens per step; 0: not drafting."""
    carried: int = 0
    """Parts of the next token when it last joined the batch."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verifications: int = 0
    """These three since it was submitted, until it last left the batch."""

    def draft(self, window: int) -> None:
        """Go on with this window; not while it runs. Raises ValueError when p is not in [0, 1]."""
        self.window = window
        # Up, so that ten steps at a rate of 1.1 are 11 tokens.
        self.rate = math.ceil(expected_tokens(window, self.acceptance) * PARTS)

    def leave(self, steps: int) -> None:
        """Count what it has after so many steps; it runs no longer.

        Accepted tokens and verifications are together the whole tokens of the steps that drafted.
        """
        assert self.joined is not None
        tokens, ran = self.tokens(steps), steps - self.joined
        if self.window:
            self.num_draft_tokens += ran * self.window
            self.num_accepted_tokens += tokens - self.done - ran
            self.num_verifications += ran
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
