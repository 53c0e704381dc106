"""Drafts of one engine, for every decoding step, from the history of its prompts. Pure.

    index of the prompt ─► draft_batch ────────┐
                                               ├─► Acceptance ─► Gate ─► drafts
    shared indexes ─► draft_batch_of_any ──────┘        ▲                   │
                                                        └── windows ◄── verified next step

Each row takes the draft with the most expected accepted tokens, whether from history, a draft model
or n-grams. The drafter measures what the shared indexes add, and searches them ever more rarely
while they add nothing. State is stored by request, because the rows of a batch move.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from refrain.engines.histospec.acceptance import Acceptance, is_shared, shared_evidence
from refrain.engines.histospec.budget import keep_likeliest
from refrain.engines.histospec.drafting import (
    NO_KEY,
    SURE,
    draft_batch,
    draft_batch_of_any,
    without_noise,
    without_turns,
)
from refrain.engines.histospec.gate import Backoff, Gate
from refrain.engines.histospec.matching import NO_INDEX
from refrain.engines.histospec.request_indexes import RequestIndexes
from refrain.engines.histospec.window import WindowPolicy
from refrain.schemas.counts import DraftingCounts

LEAST_GAIN = 0.02
"""Expected accepted tokens that a search of the shared indexes must add for each row that it
covers. The search takes a microsecond or two a row."""


@dataclass(slots=True)
class Drafts:
    """Draft tokens for the rows of a step."""

    num: np.ndarray
    """int32 [rows]: number of draft tokens."""
    tokens: np.ndarray
    """int32 [rows, window], filled from the left."""
    evidence: np.ndarray
    """uint16 [rows, window]: class of each token, see `Acceptance`."""

    @classmethod
    def none(cls, num_rows: int, window: int) -> "Drafts":
        shape = num_rows, window
        return cls(
            np.zeros(num_rows, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.uint16)
        )

    def take(self, rows: np.ndarray, other: "Drafts") -> None:
        """Copy the drafts of another instance for these rows, bool [rows]."""
        self.num[rows], self.tokens[rows] = other.num[rows], other.tokens[rows]
        self.evidence[rows] = other.evidence[rows]

    def widen(self, window: int) -> None:
        """Make room for drafts of `window` tokens."""
        missing = (0, 0), (0, max(0, window - self.tokens.shape[1]))
        self.tokens, self.evidence = np.pad(self.tokens, missing), np.pad(self.evidence, missing)

    def extends(self, other: "Drafts") -> np.ndarray:
        """Return where the draft begins with the whole draft of `other`, which has as much room;
        bool [rows]."""
        unused = np.arange(self.tokens.shape[1]) >= other.num[:, None]
        same = (self.tokens == other.tokens) | unused
        return same.all(axis=1) & (self.num >= other.num)


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """Fields of a request that drafting uses."""

    id: str
    prompt_key: str
    max_tokens: int
    """Most tokens of prompt and response together."""
    sample_key: int = NO_KEY
    """Key of the noise that samples the request, to draft what the noise will draw. `NO_KEY`:
    unknown."""
    turn_start: int = 0
    """Where the request's turn begins in its tokens. 0: it is the first turn."""


class HistoryDrafter:
    """Drafter of one engine. `directory` holds an index file for each prompt that has one."""

    def __init__(
        self,
        directory: Path,
        windows: WindowPolicy,
        gate: Gate,
        max_num_requests: int,
        *,
        shares: bool = True,
    ) -> None:
        """`shares`: whether to draft from the shared indexes."""
        self.gate = gate
        self.acceptance = Acceptance()
        self._counts: defaultdict[str, Any] = defaultdict(int)
        self.indexes = RequestIndexes(directory, max_num_requests, shares=shares)
        self._asking = Backoff()
        self._windows = windows
        self._requests: dict[str, tuple[int, str]] = {}
        """Request -> its place in the arrays, and its prompt key."""
        self._free = list(range(max_num_requests))
        self._window = np.zeros(max_num_requests, np.int32)
        self._keys = without_noise(max_num_requests)
        self._starts = without_turns(max_num_requests)
        self._max_tokens = np.zeros(max_num_requests, np.int32)
        self._num_drafted = np.zeros(max_num_requests, np.int32)
        self._evidence = np.zeros((max_num_requests, windows.cap), np.uint16)

    def knows(self, id: str) -> bool:
        return id in self._requests

    def expect(self, keys: Iterable[str]) -> None:
        """Start to open the indexes of these prompts, whose requests were submitted."""
        self.indexes.expect(keys)

    def settle(self) -> None:
        """Wait until all indexes are open that are being opened."""
        self.indexes.settle()

    def begin(self, request: DraftedRequest) -> None:
        place = self._free.pop()
        self._requests[request.id] = (place, request.prompt_key)
        self.indexes.begin(place, request.prompt_key)
        self._window[place] = self._windows.first(1)[0]
        self._max_tokens[place] = request.max_tokens
        self._keys[place] = request.sample_key
        self._starts[place] = request.turn_start
        self._num_drafted[place] = 0

    def end_others(self, ids: Sequence[str]) -> None:
        """Forget every request that is not among these."""
        for id in self._requests.keys() - set(ids):
            place, key = self._requests.pop(id)
            self._free.append(place)
            self.indexes.end(place, key)

    def places(self, ids: Sequence[str]) -> np.ndarray:
        """Return where the state of each request is; int64 [rows]."""
        return np.array([self._requests[id][0] for id in ids])

    def propose(
        self,
        places: np.ndarray,
        num_sampled: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        max_draft_tokens: int,
        others: Drafts | None = None,
    ) -> list[list[int]]:
        """Learn from the last verification and draft for the next step. Return the draft of each
        row, which may be empty.

        `places`: [rows], see `places`.
        `num_sampled`: int32 [rows], tokens that the last step emitted; 0 while the prompt is
            prefilled.
        `token_ids`: int32 [rows, any], prompt and response so far.
        `num_tokens`: int32 [rows], how many of `token_ids` are valid.
        `max_draft_tokens`: most draft tokens of all rows together.
        `others`: drafts from draft models and n-grams. They replace those of which fewer tokens are
            expected to be accepted, and those that they extend.
        """
        self._observe(places, num_sampled)
        self.indexes.follow()
        self._counts["num_steps"] += 1
        drafts = self._draft(places, num_sampled, token_ids, num_tokens, max_draft_tokens)
        num_own = self._take_others(drafts, others, max_draft_tokens) if others else drafts.num
        self._num_drafted[places] = num_own
        if not drafts.num.any():
            return [[] for _ in places]
        self._counts["num_drafting_steps"] += 1
        rows = zip(drafts.tokens.tolist(), drafts.num.tolist(), strict=True)
        return [row[:n] for row, n in rows]

    def state(self) -> dict[str, Any]:
        """Return the state that `restore` takes: everything that outlives the requests."""
        return {
            "acceptance": self.acceptance.state(),
            "gate": self.gate.state(),
            "asking": self._asking.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Start from the state of another instance. Raise ValueError or KeyError if it has another
        format."""
        self.acceptance.restore(state["acceptance"])
        self.gate.restore(state["gate"])
        self._asking.restore(state["asking"])

    def take_counts(self) -> DraftingCounts:
        counts, self._counts = self._counts, defaultdict(int)
        for name in ("num_damaged", "num_with_index", "num_without_index"):
            counts[name] = getattr(self.indexes, name)
            setattr(self.indexes, name, 0)
        return DraftingCounts(**counts)

    def _observe(self, places: np.ndarray, num_sampled: np.ndarray) -> None:
        num_drafted = self._num_drafted[places]
        # A request that was not scheduled while its draft waited has emitted nothing.
        num_drafted[num_sampled == 0] = 0
        if not num_drafted.any():
            return
        # A draft that extends this one may have more accepted tokens than were drafted here.
        num_accepted = np.clip(num_sampled - 1, 0, num_drafted)
        evidence = self._evidence[places]
        self.acceptance.observe(evidence, num_drafted, num_accepted)
        rows = is_shared(evidence[:, 0])
        self._counts["num_shared_draft_tokens"] += int(num_drafted[rows].sum())
        self._counts["num_shared_accepted_tokens"] += int(num_accepted[rows].sum())
        self._window[places] = self._windows.next(self._window[places], num_drafted, num_accepted)

    def _draft(
        self,
        places: np.ndarray,
        num_sampled: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        max_draft_tokens: int,
    ) -> Drafts:
        """Return the tokens to verify."""
        drafts = Drafts.none(len(places), self._windows.cap)
        own_slots = self.indexes.slots[places]
        shared_slots = self.indexes.shared_slots
        nothing = (own_slots == NO_INDEX).all() and not len(shared_slots)
        if nothing or not max_draft_tokens or not self.gate.looks(len(places)):
            return drafts
        # A verification emits one token more than it accepts.
        room = self._max_tokens[places] - num_tokens - 1
        windows = np.where(num_sampled > 0, np.clip(room, 0, self._window[places]), 0)
        windows = windows.astype(np.int32)
        text = (token_ids, num_tokens, windows, self._keys[places], self._starts[places])
        drafts.num = draft_batch(
            self.indexes.table.rows,
            own_slots,
            *text,
            self.acceptance.worth,
            drafts.tokens,
            drafts.evidence,
        )
        if len(shared_slots) and self._asking.looks(len(places)):
            self._ask_shared(drafts, *text)
        self._evidence[places] = drafts.evidence
        probabilities = self.acceptance.of_drafts(drafts.evidence, drafts.num)
        known = (float(num_tokens.sum()), self.acceptance.num_observed)
        paying = self.gate.keep(probabilities, drafts.num, *known)
        drafts.num = keep_likeliest(probabilities, paying, max_draft_tokens)
        return drafts

    def _ask_shared(
        self,
        drafts: Drafts,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        windows: np.ndarray,
        *rest: np.ndarray,
    ) -> None:
        """Search the shared indexes, and take their drafts where more tokens are expected to be
        accepted."""
        others = Drafts.none(*drafts.tokens.shape)
        expected = self._num_expected(drafts)
        windows = np.where(expected < SURE * windows, windows, 0).astype(np.int32)
        num_asking = np.count_nonzero(windows)
        if not num_asking:
            return
        others.num = draft_batch_of_any(
            self.indexes.table.rows,
            self.indexes.shared_slots,
            token_ids,
            num_tokens,
            windows,
            *rest,
            others.tokens,
            others.evidence,
        )
        others.evidence = shared_evidence(others.evidence)
        gain = self._num_expected(others) - expected
        better = gain > 0
        drafts.take(better, others)
        self._asking.note(len(windows), pays=gain[better].sum() >= LEAST_GAIN * num_asking)

    def _take_others(self, drafts: Drafts, others: Drafts, max_draft_tokens: int) -> np.ndarray:
        """Take the drafts of `others` that are better, and keep the likeliest tokens. Return how
        many of each row's tokens this drafter has drafted too; int32 [rows]."""
        for one, other in ((drafts, others), (others, drafts)):
            one.widen(other.tokens.shape[1])
        # Learn nothing from these rows, also where both drafts agree: such tokens are often right.
        drafts.num[self._num_expected(drafts) <= self._num_expected(others)] = 0
        num_own = drafts.num.copy()
        drafts.take(others.extends(drafts), others)
        probabilities = self.acceptance.of_drafts(drafts.evidence, drafts.num)
        drafts.num = keep_likeliest(probabilities, drafts.num, max_draft_tokens)
        return np.minimum(num_own, drafts.num)

    def _num_expected(self, drafts: Drafts) -> np.ndarray:
        """Return the expected number of accepted tokens of each row; float64 [rows]."""
        return self.acceptance.of_drafts(drafts.evidence, drafts.num).sum(axis=1)
