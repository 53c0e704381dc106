"""One request on an engine, and how its tokens grow from step to step. Pure.

A decoding step yields one token. A step that drafts w tokens yields `1 + p + ... + p^w` of them,
an expectation (`engines.specactor.expectation`): a fluid in place of a random walk. One that drafts
from history yields the mean of the replay (`engines.simulate.history`), a decoupled one an
expectation of its own. What is whole of it has been generated; the fraction is carried to the next
step. A request may be drafted for in its own way (`RolloutRequest.drafting`); without one it is as
its engine does.

Deviations: the acceptance p of a trace is a share, accepted over drafted tokens, taken here as the
probability that a draft token is accepted when those before it were. With windows beyond 1 the
share is the smaller of the two, since what follows a rejection counts as drafted, so gains are
underestimated. The last step drafts a whole window, though the response may end within it. From
history neither is so: tokens and windows are real, and their sums are exact; but they are spread
evenly over the response, where an engine has them in bursts, and more of them in the small batches
at the end, where the gate lets them pass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import sub

from engines.specactor.expectation import expected_tokens, streamed_step
from schemas.drafting import HISTORY
from schemas.rollout import DraftProgress, DraftSetting, RolloutRequest

PARTS = 1 << 32
"""Parts of a token, counted as integers: sums over a batch are exact, in whatever order."""
Acceptance = float | Mapping[str, float]
"""Probability that a draft token is accepted when those before it were, in [0, 1]: of every
drafter, or by drafter, where one that is left out is always rejected."""
NUM_STEPS = 1 << 16
"""Steps of which the mean is given: expectations as whole numbers."""
DraftCounts = tuple[int, int, int]
"""Draft tokens verified, those accepted, and verifications that rejected one."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Sums over some decode steps of a request; any part of them has its share."""

    num_passes: int
    """Decode steps, at least 1."""
    num_tokens: float
    """Tokens that they yield; whole from a replay, an expectation from an acceptance."""
    num_verifications: int = 0
    num_draft_tokens: int = 0
    """Verified."""
    num_rejections: int = 0
    """Verifications that reject one."""

    @property
    def rate(self) -> int:
        """Parts of a token that a step yields; up, so that ten steps of 1.1 tokens are 11."""
        return int(-(-self.num_tokens * PARTS // self.num_passes))

    @property
    def window(self) -> int:
        """Mean draft tokens of a step, in parts of a token."""
        return self.num_draft_tokens * PARTS // self.num_passes


DECODING = Passes(1, 1)
Replayed = Passes | Mapping[int, Passes]
"""Decode steps from history: always the same, or by the window of the setting, where more or less
of what is drafted is verified."""
_streamed_step = lru_cache(1 << 17)(streamed_step)


def drafted_passes(setting: DraftSetting, acceptance: float, pace: float = math.inf) -> Passes:
    """Steps in the long run of a request that is drafted for so. `pace`: draft tokens that
    come while a step goes on; what is decoupled depends on it."""
    window = setting.window
    if setting.coupled:
        tokens, verifying, verified = expected_tokens(window, acceptance), 1.0, float(window)
        rejecting = 1.0 - acceptance**window
    else:
        tokens, verified, verifying, rejecting = _streamed_step(window, acceptance, pace)
    return Passes(
        num_passes=NUM_STEPS,
        num_tokens=NUM_STEPS * tokens,
        num_verifications=round(NUM_STEPS * verifying),
        num_draft_tokens=round(NUM_STEPS * verified),
        num_rejections=round(NUM_STEPS * rejecting),
    )


@dataclass(slots=True)
class SimulatedRequest:
    """While it runs it has `done` tokens, and those of `steps - joined` steps at its rate."""

    request: RolloutRequest
    length: int
    """Response tokens it will have."""
    done: int
    """Response tokens when it last joined the batch."""
    submitted_s: float
    acceptance: Acceptance = 0.0
    replayed: Replayed = DECODING
    """Its decode steps when it is drafted for from history."""
    joined: int | None = None
    """Decode steps of the engine when it joined; None while it waits."""
    setting: DraftSetting | None = None
    """How it is drafted for now."""
    finished_s: float = math.inf
    passes: Passes = DECODING
    """Its decode steps as they are now."""
    rate: int = PARTS
    """Rate of `passes`."""
    carried: int = 0
    """Parts of the next token when it last joined the batch."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verifications: int = 0
    num_rejections: int = 0
    """These four since it was submitted, until it last left the batch."""
    drafted_before: DraftCounts = (0, 0, 0)
    """Counts when it was last drafted for otherwise."""
    has_kv: bool = False
    """Keys and values of its context are there, on the engine or saved for it: no prefill."""

    def draft(self, default: DraftSetting | None, paces: Mapping[str, float] | None = None) -> None:
        """Go on in its own way, or else so; not while it runs. `paces`: by drafter, as in
        `drafted_passes`. Raises ValueError when p is not in [0, 1]."""
        setting = self.request.drafting or default
        if setting != self.setting:
            self.setting = setting
            self.drafted_before = self._counts
        self.passes = self._passes(setting, paces or {})
        self.rate = self.passes.rate

    def _passes(self, setting: DraftSetting | None, paces: Mapping[str, float]) -> Passes:
        if setting is None:
            return DECODING
        if setting.drafter == HISTORY:
            replayed = self.replayed
            return replayed if isinstance(replayed, Passes) else replayed[setting.window]
        acceptance = self.acceptance
        if isinstance(acceptance, Mapping):
            acceptance = acceptance.get(setting.drafter, 0.0)
        return drafted_passes(setting, acceptance, paces.get(setting.drafter, math.inf))

    def leave(self, steps: int) -> None:
        """Count what it has after so many steps; it runs no longer."""
        assert self.joined is not None
        tokens, ran = self.tokens(steps), steps - self.joined
        self.num_draft_tokens, self.num_accepted_tokens, self.num_rejections = self.drafted(steps)
        self.num_verifications += ran * self.passes.num_verifications // self.passes.num_passes
        self.carried = (self.carried + self.rate * ran) % PARTS
        self.done, self.joined = tokens, None

    def drafted(self, steps: int) -> DraftCounts:
        """Counts after so many steps since it was submitted.

        Accepted tokens and steps are together the whole tokens of the steps that drafted.
        """
        passes = self.passes
        if self.joined is None or steps <= self.joined or not passes.num_draft_tokens:
            return self._counts
        ran = steps - self.joined
        return (
            self.num_draft_tokens + ran * passes.num_draft_tokens // passes.num_passes,
            self.num_accepted_tokens + self.tokens(steps) - self.done - ran,
            self.num_rejections + ran * passes.num_rejections // passes.num_passes,
        )

    def progress(self, steps: int) -> DraftProgress:
        """How drafting goes since it is as it is. After few steps the fraction of a token that was
        carried may make more accepted than drafted: these are left out."""
        drafted, accepted, rejections = map(sub, self.drafted(steps), self.drafted_before)
        return DraftProgress(self.setting, drafted, min(accepted, drafted), rejections)

    @property
    def _counts(self) -> DraftCounts:
        return self.num_draft_tokens, self.num_accepted_tokens, self.num_rejections

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
