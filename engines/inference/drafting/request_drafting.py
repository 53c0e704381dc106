"""Drafting for requests that have a setting of their own, in one engine, between two steps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from engines.histospec.siblings import NO_SLOT
from engines.inference.drafting.stream_drafter import DraftedRow, StreamDrafter, StreamedRequest
from engines.specactor.ngram import NgramDrafter
from schemas.drafting import NGRAM
from schemas.rollout import DraftSetting


@dataclass(slots=True)
class _Request:
    setting: DraftSetting
    max_tokens: int
    """Prompt and response, at most."""
    slot: int = NO_SLOT
    """Slot of its text, where it drafts from that."""
    num_drafted: int = 0
    """Tokens drafted for the step that runs."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestDrafting:
    """One engine's. Draft models are asked by `StreamDrafter`."""

    def __init__(self, engine: int) -> None:
        self._streams = StreamDrafter(engine)
        self._ngram = NgramDrafter()
        self._requests: dict[str, _Request] = {}

    def connect(self, addresses: Mapping[str, str]) -> None:
        self._streams.connect(addresses)

    def knows(self, id: str) -> bool:
        return id in self._requests

    def begin(self, id: str, setting: DraftSetting, sample_key: int, max_tokens: int) -> None:
        request = self._requests[id] = _Request(setting, max_tokens)
        if setting.drafter == NGRAM:
            request.slot = self._ngram.add()
        else:
            self._streams.begin(StreamedRequest(id, setting, sample_key, max_tokens))

    def end(self, ids: Collection[str]) -> None:
        for id in ids:
            request = self._requests.pop(id, None)
            if request is None:
                continue
            if request.setting.drafter == NGRAM:
                self._ngram.remove(request.slot)
            else:
                self._streams.end(id)

    def end_others(self, ids: Collection[str]) -> None:
        """Forget every request that is not among these."""
        self.end(self._requests.keys() - set(ids))

    def progress(self) -> dict[str, tuple[int, int]]:
        """(drafted, accepted) tokens of each request."""
        return {
            id: (request.num_draft_tokens, request.num_accepted_tokens)
            for id, request in self._requests.items()
        }

    def propose(self, rows: Sequence[DraftedRow], *, dropped: bool = False) -> list[list[int]]:
        """Draft tokens of each row, possibly none. `dropped`: none are verified in this pass."""
        for row in rows:
            self._observe(row)
        drafts = self._from_streams(rows) | self._from_text(rows)
        if dropped:
            drafts = {id: [] for id in drafts}
        for id, draft in drafts.items():
            self._requests[id].num_drafted = len(draft)
        return [drafts[row.id] for row in rows]

    def _observe(self, row: DraftedRow) -> None:
        request = self._requests[row.id]
        # A request that was put off while its draft waited has emitted nothing.
        if row.num_sampled and request.num_drafted:
            request.num_draft_tokens += request.num_drafted
            request.num_accepted_tokens += row.num_sampled - 1
        request.num_drafted = 0

    def _from_streams(self, rows: Sequence[DraftedRow]) -> dict[str, list[int]]:
        streamed = [row for row in rows if self._requests[row.id].setting.drafter != NGRAM]
        if not streamed:
            return {}
        drafts = self._streams.propose(streamed)
        return {row.id: draft for row, draft in zip(streamed, drafts, strict=True)}

    def _from_text(self, rows: Sequence[DraftedRow]) -> dict[str, list[int]]:
        looked_up = [row for row in rows if self._requests[row.id].setting.drafter == NGRAM]
        if not looked_up:
            return {}
        requests = [self._requests[row.id] for row in looked_up]
        num_tokens = np.array([len(row.text) for row in looked_up], np.int32)
        texts = np.zeros((len(looked_up), num_tokens.max()), np.int32)
        for text, row in zip(texts, looked_up, strict=True):
            text[: len(row.text)] = row.text
        # A verification emits one token more than it accepts.
        room = np.array([request.max_tokens for request in requests]) - num_tokens - 1
        windows = np.array([request.setting.window for request in requests])
        begun = np.array([row.num_sampled > 0 for row in looked_up])
        windows = np.where(begun, np.clip(room, 0, windows), 0).astype(np.int32)
        drafts = np.zeros((len(looked_up), max(1, windows.max())), np.int32)
        slots = np.array([request.slot for request in requests], np.int32)
        lengths = self._ngram.propose(slots, texts, num_tokens, windows, drafts)
        return {
            row.id: draft[:length].tolist()
            for row, draft, length in zip(looked_up, drafts, lengths, strict=True)
        }
