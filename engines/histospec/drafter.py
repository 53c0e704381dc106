"""Drafts every decoding step of an engine from the history of its prompts. Pure.

    requests ─► index of the prompt ─► draft_batch ─► Acceptance ─► Gate ─► drafts
                                            ▲                         │
                                            └──── windows ◄── verified next step

State is kept by request, since the rows of a batch move.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.histospec.acceptance import Acceptance, live_evidence
from engines.histospec.budget import keep_likeliest
from engines.histospec.drafting import NO_INDEX, IndexTable, draft_batch
from engines.histospec.gate import Gate
from engines.histospec.index_file import DamagedIndex, index_path, open_index
from engines.histospec.siblings import NO_SLOT, SiblingIndex
from engines.histospec.window import WindowPolicy
from schemas.counts import DraftingCounts


@dataclass(frozen=True, slots=True)
class DraftedRequest:
    """Request as drafting sees it."""

    id: str
    prompt_key: str
    max_tokens: int
    """Prompt and response, at most."""
    num_prompt_tokens: int = 0


class HistoryDrafter:
    """One engine's drafter. `directory` holds an index file for each prompt that has one."""

    def __init__(
        self,
        directory: Path,
        windows: WindowPolicy,
        gate: Gate,
        max_num_requests: int,
        siblings: SiblingIndex | None = None,
    ) -> None:
        """`siblings`: drafts from samples of the same prompt, where its history has nothing."""
        self.gate = gate
        self.acceptance = Acceptance()
        self._counts: defaultdict[str, Any] = defaultdict(int)
        self._directory = directory
        self._windows = windows
        self._siblings = siblings
        self._table = IndexTable()
        self._open_slots: dict[str, int] = {}
        """Slot of each prompt's index, shared by its requests."""
        self._num_users: Counter[str] = Counter()
        self._requests: dict[str, tuple[int, str]] = {}
        """Request -> its place in the arrays, prompt key."""
        self._free = list(range(max_num_requests))
        self._index_slots = np.full(max_num_requests, NO_INDEX, np.int32)
        self._sibling_slots = np.full(max_num_requests, NO_SLOT, np.int32)
        self._window = np.zeros(max_num_requests, np.int32)
        self._max_tokens = np.zeros(max_num_requests, np.int32)
        self._num_drafted = np.zeros(max_num_requests, np.int32)
        self._evidence = np.zeros((max_num_requests, windows.cap), np.uint8)

    def knows(self, id: str) -> bool:
        return id in self._requests

    def begin(self, request: DraftedRequest) -> None:
        place = self._free.pop()
        self._requests[request.id] = (place, request.prompt_key)
        self._index_slots[place] = self._open(request.prompt_key)
        if self._siblings:
            slot = self._siblings.add(request.prompt_key, request.num_prompt_tokens)
            self._sibling_slots[place] = slot
        self._window[place] = self._windows.first(1)[0]
        self._max_tokens[place] = request.max_tokens
        self._num_drafted[place] = 0

    def end_others(self, ids: Sequence[str]) -> None:
        """Forget every request that is not among these."""
        for id in self._requests.keys() - set(ids):
            place, key = self._requests.pop(id)
            self._free.append(place)
            if self._siblings:
                self._siblings.remove(int(self._sibling_slots[place]))
            self._close(key)

    def places(self, ids: Sequence[str]) -> np.ndarray:
        """int64 [rows]: where the state of each is."""
        return np.array([self._requests[id][0] for id in ids])

    def propose(
        self,
        places: np.ndarray,
        num_sampled: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        max_draft_tokens: int,
    ) -> list[list[int]]:
        """Take in what was verified, and draft for the next step: tokens of each row, maybe none.

        `places`: [rows], see `places`. `num_sampled`: int32 [rows], tokens that the last step
        emitted; 0: still in its prompt. `token_ids`: int32 [rows, any], prompt and response so far.
        `num_tokens`: int32 [rows], of them. `max_draft_tokens`: of all rows together.
        """
        self._observe(places, num_sampled)
        self._counts["num_steps"] += 1
        num_drafted, drafts = self._draft(
            places, num_sampled, token_ids, num_tokens, max_draft_tokens
        )
        self._num_drafted[places] = num_drafted
        if not num_drafted.any():
            return [[] for _ in places]
        self._counts["num_drafting_steps"] += 1
        return [row[:n] for row, n in zip(drafts.tolist(), num_drafted.tolist(), strict=True)]

    def state(self) -> dict[str, Any]:
        """State that `restore` takes: all that outlives the requests."""
        return {"acceptance": self.acceptance.state(), "gate": self.gate.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Begin with what another one has learnt. Raises ValueError or KeyError when it is of
        another kind."""
        self.acceptance.restore(state["acceptance"])
        self.gate.restore(state["gate"])

    def take_counts(self) -> DraftingCounts:
        counts, self._counts = self._counts, defaultdict(int)
        return DraftingCounts(**counts)

    def _observe(self, places: np.ndarray, num_sampled: np.ndarray) -> None:
        num_drafted = self._num_drafted[places]
        # A request that was put off while its draft waited has emitted nothing.
        num_drafted[num_sampled == 0] = 0
        if not num_drafted.any():
            return
        num_accepted = np.maximum(num_sampled - 1, 0)
        self.acceptance.observe(self._evidence[places], num_drafted, num_accepted)
        self._window[places] = self._windows.next(self._window[places], num_drafted, num_accepted)

    def _draft(
        self,
        places: np.ndarray,
        num_sampled: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        max_draft_tokens: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """int32 [rows] tokens to verify, int32 [rows, window] drafts."""
        drafts = np.zeros((len(places), self._windows.cap), np.int32)
        index_slots = self._index_slots[places]
        nothing = self._siblings is None and (index_slots == NO_INDEX).all()
        if nothing or not self.gate.looks(len(places)):
            return np.zeros(len(places), np.int32), drafts
        # A verification emits one token more than it accepts.
        room = self._max_tokens[places] - num_tokens - 1
        windows = np.where(num_sampled > 0, np.clip(room, 0, self._window[places]), 0)
        windows = windows.astype(np.int32)
        evidence = np.zeros(drafts.shape, np.uint8)
        num_drafted = draft_batch(
            self._table.rows, index_slots, token_ids, num_tokens, windows, drafts, evidence
        )
        if self._siblings:
            slots = self._sibling_slots[places]
            self._siblings.extend(slots, token_ids, num_tokens)
            windows[num_drafted > 0] = 0
            matched = np.zeros(len(places), np.int32)
            num_live = self._siblings.draft(slots, token_ids, num_tokens, windows, drafts, matched)
            evidence[num_live > 0] = live_evidence(matched[num_live > 0])[:, None]
            num_drafted = num_drafted + num_live
        self._evidence[places] = evidence
        probabilities = self.acceptance.of_drafts(evidence, num_drafted)
        paying = self.gate.keep(probabilities, num_drafted, float(num_tokens.sum()))
        return keep_likeliest(probabilities, paying, max_draft_tokens), drafts

    def _open(self, key: str) -> int:
        if key not in self._open_slots:
            self._open_slots[key] = self._map(key)
        self._num_users[key] += 1
        slot = self._open_slots[key]
        # A canary has no key, and nobody expects it to have a history.
        self._counts["num_without_index"] += slot == NO_INDEX and key != ""
        return slot

    def _map(self, key: str) -> int:
        try:
            return self._table.add(open_index(index_path(self._directory, key), key))
        except FileNotFoundError:
            return NO_INDEX
        except DamagedIndex:
            # Drafts are optional; whoever owns the files finds and replaces it.
            self._counts["num_damaged"] += 1
            return NO_INDEX

    def _close(self, key: str) -> None:
        self._num_users[key] -= 1
        if self._num_users[key] == 0:
            del self._num_users[key]
            slot = self._open_slots.pop(key)
            if slot != NO_INDEX:
                self._table.remove(slot)
