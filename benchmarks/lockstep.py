"""Generate known responses again in lockstep, with any drafter.

Sampling is exact. So a draft token would have been accepted exactly if it is the token that was
generated there. Every pass drafts for all unfinished rows and verifies the drafts. It yields the
accepted tokens and one more for each row, as in `engines.histospec.replay`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from refrain.engines.histospec.library import PromptHistory
from refrain.engines.histospec.replay import count_accepted, known_sequences
from refrain.engines.latency.interface import Latency


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that one engine decodes together."""

    prompts: Mapping[str, np.ndarray]
    """Prompts by key; int32 [tokens]."""
    keys: Sequence[str]
    """Prompt key of each row."""
    responses: Sequence[np.ndarray]
    """Response of each row; int32 [tokens]."""
    history: Mapping[str, PromptHistory]
    """Last earlier group of each prompt that has one."""
    sample_keys: Sequence[int] = ()
    """Key of the noise of each row, if known."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The unfinished rows of a batch before a pass."""

    live: np.ndarray
    """int64 [rows]: index of each row in the batch."""
    token_ids: np.ndarray
    """int32 [rows, any]: prompt and response, including tokens that are not generated yet."""
    num_tokens: np.ndarray
    """int32 [rows]: tokens of the prompt and of the response so far."""
    room: np.ndarray
    """int32 [rows]: longest useful draft, as the pass itself yields one token."""


class LockstepDrafter:
    """Decoding without drafts, and the base class of drafters."""

    cap = 1
    """Longest draft, in tokens."""

    def begin(self, batch: Batch, ends: np.ndarray) -> None:
        """Begin a batch. Rows end at `ends`, int32 [rows of the batch], including prompts."""

    def draft(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return drafts, int32 [rows, cap], filled from the left, and their lengths, int32
        [rows]."""
        num_rows = len(rows.live)
        return np.zeros((num_rows, self.cap), np.int32), np.zeros(num_rows, np.int32)

    def learn(self, groups: Sequence[PromptHistory]) -> None:
        """Add the groups of a finished step."""

    def observe(self, rows: Rows, num_accepted: np.ndarray) -> None:
        """Learn how many tokens of the last drafts were accepted, int32 [rows]."""


@dataclass(slots=True)
class DraftTally:
    """Sums over passes."""

    num_passes: int = 0
    """Forward passes of a row, with drafts and without."""
    num_drafted: int = 0
    num_accepted: int = 0
    rollout_s: float = 0.0
    """Predicted seconds of one engine; 0 without a latency model."""
    draft_s: float = 0.0
    """Seconds spent drafting here, without building indexes."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per forward pass; 1 without drafts."""
        return 1.0 + self.num_accepted / max(1, self.num_passes)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 without drafts."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def speculation_rate(self) -> float:
        """Share of all tokens that came from drafts."""
        return self.num_accepted / max(1, self.num_accepted + self.num_passes)

    def __add__(self, other: "DraftTally") -> "DraftTally":
        return DraftTally(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(slots=True)
class PassTime:
    """Predicted seconds of a pass: drafting and verifying the mean draft of its rows.

    Times between whole windows are interpolated. One drafter's draft times hold for all drafters.
    """

    latency: Latency
    tp_degree: int
    drafter: str
    _draft_s: Callable[[str, int, int], float] = field(init=False)

    def __post_init__(self) -> None:
        self._draft_s = cache(self.latency.draft_s)

    def __call__(self, batch: int, context_tokens: int, num_drafted: int) -> float:
        low, rest = divmod(num_drafted, batch)
        seconds = self._at(batch, context_tokens, low)
        if rest:
            seconds += (self._at(batch, context_tokens, low + 1) - seconds) * rest / batch
        return seconds

    def _at(self, batch: int, context_tokens: int, window: int) -> float:
        verify_s = self.latency.verify_s(self.tp_degree, batch, context_tokens, window)
        return verify_s + (self._draft_s(self.drafter, batch, window) if window else 0.0)


def generate_again(
    batch: Batch, drafter: LockstepDrafter, pass_s: PassTime | None = None
) -> DraftTally:
    """Generate every response again, from its first token to its last."""
    prompts = [batch.prompts[key] for key in batch.keys]
    token_ids, at, ends = known_sequences(prompts, batch.responses, drafter.cap)
    tally = DraftTally()
    drafter.begin(batch, ends)
    live = np.arange(len(ends))
    while len(live):
        rows = Rows(live, token_ids[live], at[live], ends[live] - at[live] - 1)
        started_s = time.perf_counter()
        drafts, num_drafted = drafter.draft(rows)
        drafted_s = time.perf_counter()
        num_accepted = count_accepted(drafts, num_drafted, rows.token_ids, rows.num_tokens)
        verified_s = time.perf_counter()
        drafter.observe(rows, num_accepted)
        tally.draft_s += time.perf_counter() - verified_s + drafted_s - started_s
        tally.num_passes += len(live)
        tally.num_drafted += int(num_drafted.sum())
        tally.num_accepted += int(num_accepted.sum())
        if pass_s:
            context_tokens = int(rows.num_tokens.sum())
            tally.rollout_s += pass_s(len(live), context_tokens, int(num_drafted.sum()))
        at[live] += num_accepted + 1
        live = live[at[live] < ends[live]]
    return tally
