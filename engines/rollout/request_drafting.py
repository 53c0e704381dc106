"""Drafting for requests that have a setting of their own, in one engine, between two steps."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from engines.rollout.stream_drafter import DraftedRow, StreamDrafter, StreamedRequest
from schemas.config import NGRAM
from schemas.rollout import DraftSetting


@dataclass(slots=True)
class _Request:
    setting: DraftSetting
    max_tokens: int
    """Prompt and response, at most."""
    num_drafted: int = 0
    """For the step that runs."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestDrafting:
    """One engine's. Draft models are asked by `StreamDrafter`."""

    def __init__(self, engine: int) -> None:
        self._streams = StreamDrafter(engine)
        self._requests: dict[str, _Request] = {}

    def connect(self, addresses: Mapping[str, str]) -> None:
        self._streams.connect(addresses)

    def knows(self, id: str) -> bool:
        return id in self._requests

    def begin(self, id: str, setting: DraftSetting, sample_key: int, max_tokens: int) -> None:
        self._requests[id] = _Request(setting, max_tokens)
        if setting.drafter != NGRAM:
            self._streams.begin(StreamedRequest(id, setting, sample_key, max_tokens))

    def end(self, ids: Collection[str]) -> None:
        known = [id for id in ids if id in self._requests]
        self._streams.end([id for id in known if self._requests[id].setting.drafter != NGRAM])
        for id in known:
            del self._requests[id]

    def end_others(self, ids: Collection[str]) -> None:
        """Forget every request that is not among these."""
        self.end(self._requests.keys() - set(ids))

    def progress(self) -> dict[str, tuple[int, int]]:
        """(drafted, accepted) tokens of each request."""
        return {
            id: (request.num_draft_tokens, request.num_accepted_tokens)
            for id, request in self._requests.items()
        }

    def propose(self, rows: Sequence[DraftedRow]) -> list[list[int]]:
        """Draft tokens of each row, possibly none."""
        for row in rows:
            self._observe(row)
        drafts = self._from_streams(rows) | self._from_text(rows)
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
        return {row.id: [] for row in looked_up}
