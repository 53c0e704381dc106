"""A verifier's drafts from models in other processes: what has arrived is verified.

Between two steps of the engine: tell each drafter what was emitted, read what it has sent, propose
what is pending. Only requests whose drafting is coupled are waited for, and not beyond
`COUPLED_WAIT_S`; a drafter that let this pass is not waited for until it is heard of again.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engines.inference.drafting.draft_link import DraftLink
from engines.specactor.streams import Drafted, Opened, Verified, VerifyStream
from schemas.rollout import DraftSetting

COUPLED_WAIT_S = 5.0


class DraftedRow(NamedTuple):
    """A row of the running batch after a step."""

    row: int
    id: str
    num_sampled: int
    """Tokens that the step emitted; 0: still in its prompt."""
    text: np.ndarray
    """int32 [any]: prompt and response so far."""


@dataclass(slots=True)
class StreamedRequest:
    """A request that is drafted for elsewhere."""

    id: str
    setting: DraftSetting
    sample_key: int
    max_tokens: int
    """Prompt and response, at most."""
    stream: VerifyStream | None = None
    """Verifier's end of its stream; None: the drafter does not know of it yet."""


class StreamDrafter:
    """One engine's streams, by request."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._links: dict[str, DraftLink] = {}
        """Links by drafter."""
        self._silent: set[str] = set()
        self._requests: dict[str, StreamedRequest] = {}

    def connect(self, addresses: Mapping[str, str]) -> None:
        """Reach these drafters there from now on. Their requests are opened anew."""
        for drafter, address in addresses.items():
            if link := self._links.pop(drafter, None):
                link.close()
            self._links[drafter] = DraftLink(address, self._engine)
            self._silent.discard(drafter)
        for request in self._requests.values():
            if request.setting.drafter in addresses:
                request.stream = None

    def knows(self, drafter: str) -> bool:
        return drafter in self._links

    def begin(self, request: StreamedRequest) -> None:
        self._requests[request.id] = request

    def end(self, id: str) -> None:
        request = self._requests.pop(id)
        if request.stream is not None:
            self._links[request.setting.drafter].send([id], [], [])

    def propose(self, rows: Sequence[DraftedRow]) -> list[list[int]]:
        """Tell what was verified; draft tokens of each row for the next step, possibly none."""
        texts = {row.id: row.text for row in rows}
        opened: dict[str, list[Opened]] = defaultdict(list)
        verified: dict[str, list[Verified]] = defaultdict(list)
        for row in rows:
            request = self._requests[row.id]
            if request.stream is not None:
                if told := _advance(request, request.stream, row.text):
                    verified[request.setting.drafter].append(told)
            elif row.num_sampled:
                opened[request.setting.drafter].append(_open(request, row.text))
        for drafter, link in self._links.items():
            link.send([], opened[drafter], verified[drafter])
        self._receive(texts)
        return [_pending(self._requests[row.id], row) for row in rows]

    def _receive(self, texts: Mapping[str, np.ndarray]) -> None:
        for drafter in self._links:
            self._take(drafter, texts, timeout_s=0.0)
        deadline_s = time.monotonic() + COUPLED_WAIT_S
        while awaited := self._awaited(texts):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._silent |= awaited
                return
            for drafter in awaited:
                self._take(drafter, texts, timeout_s=left_s)

    def _take(self, drafter: str, texts: Mapping[str, np.ndarray], timeout_s: float) -> None:
        drafted: list[Drafted] = self._links[drafter].receive(timeout_s)
        if drafted:
            self._silent.discard(drafter)
        for told in drafted:
            request = self._requests.get(told.id)
            # It may have ended, or be drafted for by another meanwhile.
            known = request and request.setting.drafter == drafter and told.id in texts
            if known and request.stream is not None:
                request.stream.receive(told, texts[told.id])

    def _awaited(self, ids: Collection[str]) -> set[str]:
        """Drafters without which a coupled request cannot go on."""
        requests = [self._requests[id] for id in ids]
        return {
            request.setting.drafter
            for request in requests
            if request.setting.coupled and request.stream and request.stream.awaits
        } - self._silent


def _open(request: StreamedRequest, text: np.ndarray) -> Opened:
    request.stream = VerifyStream(len(text))
    return Opened(
        id=request.id,
        token_ids=text.tolist(),
        sample_key=request.sample_key,
        window=request.setting.window,
        coupled=request.setting.coupled,
        max_tokens=request.max_tokens,
    )


def _advance(request: StreamedRequest, stream: VerifyStream, text: np.ndarray) -> Verified | None:
    start = stream.num_tokens
    emitted = text[start:].tolist()
    stream.advance(emitted)
    return Verified(request.id, start, emitted) if emitted else None


def _pending(request: StreamedRequest, row: DraftedRow) -> list[int]:
    if request.stream is None or not row.num_sampled:
        return []
    # A verification emits one token more than it accepts.
    room = request.max_tokens - len(row.text) - 1
    return request.stream.pending[: max(0, min(request.setting.window, room))]
