"""A request on a virtual engine, and how its tokens grow from step to step. Pure.

The tokens that a step yields depend on the request's draft setting:

    no drafting      1
    in turn          1 + p + ... + p^w, an expectation (`engines.latency.expectation`)
    ahead            an expectation too (`streamed_step`, in the same module)
    history          the mean over the replayed response (`engines.simulate.history`)

Here w is the draft window, and p the probability that a draft token is accepted if those before it
were. So tokens grow evenly, not at random. Whole tokens count as generated, and the fraction is
carried to the next step. A request may have its own draft setting (`RolloutRequest.drafting`);
otherwise the setting of its engine applies.

A conversation leaves the batch at the end of each turn, for as long as it waited when it was
recorded. Then its observed tokens join its context, and a prefill gives the next turn its first
token.

Deviations with an acceptance from a trace:

- The trace has accepted / drafted tokens, and the simulation takes this share for p. With windows
  above 1 the share is smaller than p, because tokens after a rejection count as drafted too. So
  the simulation underestimates gains.
- The last step drafts a whole window, even if the response ends within it.

Deviation with history: windows and tokens are real and their sums are exact, but they are spread
evenly over the response. A real engine drafts in bursts. It drafts more in the small batches at the
end of a step, where the gate allows more drafts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import sub
from typing import NamedTuple

from refrain.engines.latency.expectation import expected_tokens, streamed_step
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import DraftProgress, DraftSetting, RolloutRequest, Turn

PARTS = 1 << 32
"""Parts per token. Counts in integer parts have exact sums in any order."""
Acceptance = float | Mapping[str, float]
"""Probability in [0, 1] that a draft token is accepted if those before it were. One value for all
drafters, or a value by drafter; drafts of an absent drafter are always rejected."""
NUM_STEPS = 1 << 16
"""Number of steps over which expectations are rounded to whole numbers."""
DraftCounts = tuple[int, int, int]
"""Verified draft tokens, accepted draft tokens, and verifications that rejected a draft token."""


@dataclass(frozen=True, slots=True)
class Passes:
    """Sums over some decode steps of a request. A part of the steps has its share of the sums."""

    num_passes: int
    """Decode steps, at least 1."""
    num_tokens: float
    """Tokens that the steps yield: a whole number from a replay, or an expectation."""
    num_verifications: int = 0
    num_draft_tokens: int = 0
    """Verified draft tokens."""
    num_rejections: int = 0
    """Verifications that reject a draft token."""

    @property
    def rate(self) -> int:
        """Parts of a token that a step yields, rounded up, so that ten steps of 1.1 give 11."""
        return int(-(-self.num_tokens * PARTS // self.num_passes))

    @property
    def window(self) -> int:
        """Mean draft tokens of a step, in parts of a token."""
        return self.num_draft_tokens * PARTS // self.num_passes


DECODING = Passes(1, 1)
Replayed = Passes | Mapping[int, Passes]
"""Decode steps with drafts from history: the same for every setting, or by the setting's window,
which limits the verified drafts."""


class DrafterPace(NamedTuple):
    """How fast a drafter that drafts ahead is for the requests of an engine."""

    num_drafts: float
    """Draft tokens of each request that arrive during a step."""
    alone: bool
    """Whether the engine has one request."""


FASTEST = DrafterPace(math.inf, alone=False)


def drafted_passes(setting: DraftSetting, acceptance: float, pace: DrafterPace = FASTEST) -> Passes:
    """Return the expected decode steps of a request with this draft setting. `pace`: only drafting
    ahead depends on it."""
    window = setting.window
    if setting.coupled:
        tokens, verifying, verified = expected_tokens(window, acceptance), 1.0, float(window)
        rejecting = 1.0 - acceptance**window
    else:
        tokens, verified, verifying, rejecting = streamed_step(window, acceptance, *pace)
    return Passes(
        num_passes=NUM_STEPS,
        num_tokens=NUM_STEPS * tokens,
        num_verifications=round(NUM_STEPS * verifying),
        num_draft_tokens=round(NUM_STEPS * verified),
        num_rejections=round(NUM_STEPS * rejecting),
    )


@dataclass(slots=True)
class SimulatedRequest:
    """A request on a virtual engine.

    While it runs, its tokens are `done` plus those of `steps - joined` steps at its rate.
    """

    request: RolloutRequest
    length: int
    """Response tokens that it will have in the end."""
    done: int
    """Response tokens when it last joined the batch."""
    submitted_s: float
    acceptance: Acceptance = 0.0
    replayed: Replayed = DECODING
    """Its decode steps with drafts from history."""
    joined: int | None = None
    """Decode steps of the engine when the request joined; None while it waits."""
    setting: DraftSetting | None = None
    """Its current draft setting."""
    finished_s: float = math.inf
    passes: Passes = DECODING
    """Its decode steps with the current setting."""
    rate: int = PARTS
    """Rate of `passes`."""
    carried: int = 0
    """Parts of the next token when it last joined the batch."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_verifications: int = 0
    num_rejections: int = 0
    """These four count from its submission until it last left the batch."""
    drafted_before: DraftCounts = (0, 0, 0)
    """Its counts when its draft setting last changed."""
    has_kv: bool = False
    """Whether its KV cache exists, on the engine or saved. Then it needs no prefill."""
    turns: tuple[Turn, ...] = ()
    """Its turns as recorded, with all tokens. Empty: a single turn."""
    num_ended: int = 0
    """Turns that have ended."""
    back_s: float | None = None
    """Time of the answer to its last turn, if it waits for that."""
    observed: int = 0
    """Tokens that its environment has given."""
    num_cached: int = 0
    """Tokens of its context that a prefill need not compute."""
    stop: int = field(init=False)
    """Response tokens at the end of its turn."""

    def __post_init__(self) -> None:
        self.stop = self._turn_end()

    def _turn_end(self) -> int:
        """Return the response tokens at the end of the turn that goes on, or that waits."""
        begun = self.turns[: self.num_ended + (self.back_s is None)]
        return sum(turn.num_sampled for turn in begun) if begun else self.length

    def end_turn(self, now_s: float) -> None:
        """Begin to wait for the answer to the turn that has ended."""
        self.back_s = now_s + self.turns[self.num_ended].waited_s
        self.num_ended += 1
        self.carried = 0

    def begin_turn(self) -> None:
        """Go on with the next turn, after the answer to the last one."""
        # The last token that it sampled has no keys and values.
        self.num_cached = self.context(0) - 1 if self.has_kv else 0
        self.observed += self.turns[self.num_ended - 1].num_observed or 0
        self.has_kv, self.back_s = False, None
        self.stop = self._turn_end()

    def draft(
        self, default: DraftSetting | None, paces: Mapping[str, DrafterPace] | None = None
    ) -> None:
        """Draft with the request's own setting, or else with `default`.

        Do not call it while the request runs. `paces`: by drafter, as in `drafted_passes`. Raise
        ValueError when the acceptance is not in [0, 1].
        """
        setting = self.request.drafting or default
        if setting != self.setting:
            self.setting = setting
            self.drafted_before = self._counts
        self.passes = self._passes(setting, paces or {})
        self.rate = self.passes.rate

    def _passes(self, setting: DraftSetting | None, paces: Mapping[str, DrafterPace]) -> Passes:
        if setting is None:
            return DECODING
        if setting.drafter == HISTORY:
            replayed = self.replayed
            return replayed if isinstance(replayed, Passes) else replayed[setting.window]
        acceptance = self.acceptance
        if isinstance(acceptance, Mapping):
            acceptance = acceptance.get(setting.drafter, 0.0)
        return drafted_passes(setting, acceptance, paces.get(setting.drafter, FASTEST))

    def leave(self, steps: int) -> None:
        """Take the request out of the batch, and add up its tokens and counts."""
        assert self.joined is not None
        tokens, ran = self.tokens(steps), steps - self.joined
        self.num_draft_tokens, self.num_accepted_tokens, self.num_rejections = self.drafted(steps)
        self.num_verifications += ran * self.passes.num_verifications // self.passes.num_passes
        self.carried = (self.carried + self.rate * ran) % PARTS
        self.done, self.joined = tokens, None

    def drafted(self, steps: int) -> DraftCounts:
        """Return the counts since submission, at this decode step of the engine.

        In steps that draft, accepted tokens + steps = whole tokens.
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
        """Return the drafting progress since the setting last changed.

        After few steps, the carried fraction of a token could make more tokens accepted than
        drafted. Such tokens are left out.
        """
        drafted, accepted, rejections = map(sub, self.drafted(steps), self.drafted_before)
        return DraftProgress(self.setting, drafted, min(accepted, drafted), rejections)

    @property
    def _counts(self) -> DraftCounts:
        return self.num_draft_tokens, self.num_accepted_tokens, self.num_rejections

    def tokens(self, steps: int) -> int:
        """Return the whole response tokens after so many decode steps of the engine."""
        if self.joined is None or steps <= self.joined:
            return self.done
        gained = (self.carried + self.rate * (steps - self.joined)) // PARTS
        return min(self.stop, self.done + gained)

    def context(self, steps: int) -> int:
        return len(self.request.prompt_token_ids) + self.observed + self.tokens(steps)

    def context_parts(self, steps: int) -> int:
        """Return the context in parts of a token, the carried fraction included."""
        ran = 0 if self.joined is None else steps - self.joined
        given = len(self.request.prompt_token_ids) + self.observed
        return (given + self.done) * PARTS + self.carried + self.rate * ran

    @property
    def steps_left(self) -> int:
        """Steps from joining until the request ends its turn."""
        return -((self.carried - (self.stop - self.done) * PARTS) // self.rate)
