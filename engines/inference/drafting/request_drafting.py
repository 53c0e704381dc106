"""Drafting between two steps of an engine, for requests that have their own draft setting.

    a text drafter   drafts come from the request's own tokens, for example by `ngram`
    a head           drafts come from the policy's last hidden state; the engine computes them
    a draft model    drafts come from a drafter process that runs ahead; we verify what has arrived

After each step we send the emitted tokens to each drafter, read the drafts that it has sent, and
propose the pending ones. We never wait, because a step serves all requests: a request without
drafts decodes one token.

The history drafter may draft for the same requests, and decides which draft is verified. All
drafters guess tokens of the same response, so the draft model receives the accepted tokens, whoever
guessed them. We compare its unused drafts with them too, to know how often it is right.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from refrain.engines.histospec.acceptance import PRIOR_WEIGHT, Acceptance, record_evidence
from refrain.engines.histospec.drafter import Drafts
from refrain.engines.histospec.gate import Gate
from refrain.engines.histospec.siblings import NO_SLOT
from refrain.engines.inference.drafting.draft_link import DraftLink
from refrain.engines.specactor.streams import Opened, Verified, VerifyStream, agreeing
from refrain.engines.specactor.text_drafters import TEXT_DRAFTERS, TextDrafter
from refrain.schemas.drafting import HEAD
from refrain.schemas.rollout import DraftSetting

_RECORD_TOKENS = 64
"""Draft tokens that a record covers. It must not be less than the longest draft."""


class DraftedRow(NamedTuple):
    """One row of the running batch after a step."""

    row: int
    id: str
    num_sampled: int
    """Tokens that the step emitted; 0 while it computes the prompt."""
    text: np.ndarray
    """int32 [any]: tokens of the prompt and the response so far."""


class RowDrafter(Protocol):
    """Drafter that knows the running batch (`head_drafter`)."""

    gate: Gate
    """Decides when it pays."""

    def propose(self, rows: Sequence[DraftedRow], windows: Sequence[int]) -> list[list[int]]:
        """Return a draft of each row. `windows`: most tokens of each, at least one above 0; 0 where
        the step emitted none."""
        ...


@dataclass(slots=True)
class _Record:
    """Share of right tokens among the last draft tokens, verified or not."""

    share: float = 0.5
    num_tokens: float = PRIOR_WEIGHT

    def add(self, num_right: int, num_tried: int) -> None:
        self.num_tokens = min(self.num_tokens + num_tried, _RECORD_TOKENS)
        self.share += (num_right - num_tried * self.share) / self.num_tokens


@dataclass(slots=True)
class _Request:
    setting: DraftSetting
    sample_key: int
    max_tokens: int
    """Most tokens of prompt and response together."""
    record: _Record
    slot: int = NO_SLOT
    """Slot of its text drafter; `NO_SLOT` with other drafters."""
    stream: VerifyStream | None = None
    """Verifier's end of its stream; None while no connected drafter knows the request."""
    draft: list[int] = field(default_factory=list)
    """Tokens drafted for the running step, verified or not."""
    num_drafted: int = 0
    """Number of tokens at the start of `draft` that the running step verifies."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejections: int = 0

    def room(self, num_tokens: int) -> int:
        """Return the most tokens to draft after `num_tokens` tokens of prompt and response.

        A verification emits one token more than it accepts.
        """
        return max(0, min(self.setting.window, self.max_tokens - num_tokens - 1))


Pair = tuple[DraftedRow, _Request]


class RequestDrafting:
    """Drafting for the requests of one engine that have their own draft setting."""

    def __init__(
        self,
        engine: int,
        vocab_size: int,
        acceptance: Acceptance,
        head: RowDrafter | None = None,
    ) -> None:
        """`head`: drafts for requests whose drafter is `HEAD`."""
        self._head = head
        self._engine, self._vocab_size, self._acceptance = engine, vocab_size, acceptance
        self._text_drafters = {name: make() for name, make in TEXT_DRAFTERS.items()}
        self._links: dict[str, DraftLink] = {}
        """Connection to each drafter, by name."""
        self._requests: dict[str, _Request] = {}
        self._records: dict[str, _Record] = defaultdict(_Record)
        """Record of each drafter. Its new requests begin with this share."""

    def connect(self, addresses: Mapping[str, str]) -> None:
        """Connect to drafters at these addresses, and reopen their requests there."""
        for drafter, address in addresses.items():
            if link := self._links.pop(drafter, None):
                link.close()
            self._links[drafter] = DraftLink(address, self._engine, self._vocab_size)
        for request in self._requests.values():
            if request.setting.drafter in addresses:
                request.stream = None

    def knows(self, id: str) -> bool:
        return id in self._requests

    def begin(self, id: str, setting: DraftSetting, sample_key: int, max_tokens: int) -> None:
        drafter = self._text_drafters.get(setting.drafter)
        slot = drafter.add() if drafter else NO_SLOT
        record = _Record(self._records[setting.drafter].share)
        self._requests[id] = _Request(setting, sample_key, max_tokens, record, slot)

    def end(self, ids: Collection[str]) -> None:
        for id in ids:
            request = self._requests.pop(id, None)
            if request and (drafter := self._text_drafters.get(request.setting.drafter)):
                drafter.remove(request.slot)
            elif request and request.stream:
                self._links[request.setting.drafter].close_streams([id])

    def end_others(self, ids: Collection[str]) -> None:
        """Forget all requests except these."""
        self.end(self._requests.keys() - set(ids))

    def progress(self) -> dict[str, tuple[int, int, int]]:
        """Return (drafted tokens, accepted tokens, drafts with a rejection) of each request."""
        return {
            id: (r.num_draft_tokens, r.num_accepted_tokens, r.num_rejections)
            for id, r in self._requests.items()
        }

    def propose(self, rows: Sequence[DraftedRow], num_rows: int) -> Drafts:
        """Return drafts for these rows of a batch of `num_rows`. Call `verify` afterwards."""
        pairs = [(row, self._requests[row.id]) for row in rows]
        # A request that the step left out has emitted nothing, and its draft still waits.
        self._observe([(row, one) for row, one in pairs if row.num_sampled and one.draft])
        by_drafter: dict[str, list[Pair]] = defaultdict(list)
        for row, request in pairs:
            by_drafter[request.setting.drafter].append((row, request))
        drafted: dict[str, list[int]] = {}
        for name in by_drafter.keys() & self._text_drafters.keys():
            drafted |= _from_text(self._text_drafters[name], by_drafter.pop(name))
        of_head = by_drafter.pop(HEAD, [])
        drafted |= self._from_head(of_head, num_rows)
        drafted |= self._from_streams([pair for pairs in by_drafter.values() for pair in pairs])
        drafts = Drafts.none(num_rows, max(map(len, drafted.values()), default=0))
        for row, request in pairs:
            request.draft = draft = drafted[row.id]
            drafts.num[row.row] = len(draft)
            drafts.tokens[row.row, : len(draft)] = draft
            drafts.evidence[row.row] = record_evidence(np.array(request.record.share))
        self._keep_paying(of_head, drafts)
        return drafts

    def verify(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]]) -> None:
        """Record which drafts the next step verifies. `drafts`: of each row of the batch."""
        for row in rows:
            request = self._requests[row.id]
            request.num_drafted = agreeing(request.draft, drafts[row.row])

    def _observe(self, pairs: Sequence[Pair]) -> None:
        """Learn how much of the last drafts was right, from the emitted tokens."""
        if not pairs:
            return
        shares = np.array([request.record.share for _, request in pairs])
        num_right, num_tested = np.zeros((2, len(pairs)), np.int32)
        for at, (row, request) in enumerate(pairs):
            num_drafted, num_accepted = request.num_drafted, row.num_sampled - 1
            if num_drafted:
                request.num_draft_tokens += num_drafted
                request.num_accepted_tokens += min(num_accepted, num_drafted)
                request.num_rejections += num_accepted < num_drafted
            emitted = row.text[len(row.text) - row.num_sampled :].tolist()
            num_right[at] = right = agreeing(request.draft, emitted)
            num_tested[at] = tested = min(len(request.draft), len(emitted))
            for record in (request.record, self._records[request.setting.drafter]):
                record.add(right, right + (right < tested))
        evidence = np.tile(record_evidence(shares)[:, None], num_tested.max())
        self._acceptance.observe(evidence, num_tested, num_right)

    def _from_head(self, pairs: Sequence[Pair], num_rows: int) -> dict[str, list[int]]:
        """Return the head's drafts by request id. They are empty in a step in which drafting does
        not pay."""
        if not pairs:
            return {}
        assert self._head is not None, "this engine has no draft head"
        rows, started_s = [row for row, _ in pairs], time.perf_counter()
        windows = [request.room(len(row.text)) if row.num_sampled else 0 for row, request in pairs]
        drafts: list[list[int]] = [[] for _ in rows]
        if any(windows) and self._head.gate.looks(num_rows):
            drafts = self._head.propose(rows, windows)
            self._head.gate.proposed(num_rows, time.perf_counter() - started_s)
        return dict(zip((row.id for row in rows), drafts, strict=True))

    def _keep_paying(self, pairs: Sequence[Pair], drafts: Drafts) -> None:
        """Leave out the head's draft tokens whose verification takes longer than it saves."""
        rows = [row.row for row, request in pairs if request.draft]
        if not rows or self._head is None:
            return
        num = np.zeros_like(drafts.num)
        num[rows] = drafts.num[rows]
        probabilities = self._acceptance.of_drafts(drafts.evidence, num)
        known = float(sum(len(row.text) for row, _ in pairs)), self._acceptance.num_observed
        drafts.num[rows] = self._head.gate.keep(probabilities, num, *known)[rows]

    def _from_streams(self, pairs: Sequence[Pair]) -> dict[str, list[int]]:
        """Send the verified tokens to the drafters. Return the pending drafts by request id."""
        if not pairs:
            return {}
        opened: dict[str, list[Opened]] = defaultdict(list)
        verified: dict[str, list[Verified]] = defaultdict(list)
        writable = {drafter: link for drafter, link in self._links.items() if link.writable}
        for row, request in pairs:
            if request.setting.drafter not in writable:
                # The drafter would miss tokens, so open the request later.
                request.stream = None
            elif request.stream is not None:
                if told := _advance(row, request.stream):
                    verified[request.setting.drafter].append(told)
            else:
                # Open it during prefill too: the drafter computes the prompt at the same time.
                opened[request.setting.drafter].append(_open(row, request))
        for drafter, link in writable.items():
            link.send(opened[drafter], verified[drafter])
        self._receive({row.id: row.text for row, _ in pairs})
        return {
            row.id: request.stream.pending[: request.room(len(row.text))]
            if request.stream and row.num_sampled
            else []
            for row, request in pairs
        }

    def _receive(self, texts: Mapping[str, np.ndarray]) -> None:
        for drafter, link in self._links.items():
            for told in link.receive():
                request = self._requests.get(told.id)
                # The request may have ended or changed its drafter in the meantime.
                known = request and request.setting.drafter == drafter and told.id in texts
                if known and request.stream is not None:
                    request.stream.receive(told, texts[told.id])


def _from_text(drafter: TextDrafter, pairs: Sequence[Pair]) -> dict[str, list[int]]:
    """Return the drafts of a drafter's requests by request id."""
    num_tokens = np.array([len(row.text) for row, _ in pairs], np.int32)
    texts = np.zeros((len(pairs), num_tokens.max()), np.int32)
    for text, (row, _) in zip(texts, pairs, strict=True):
        text[: len(row.text)] = row.text
    windows = np.array(
        [request.room(len(row.text)) if row.num_sampled else 0 for row, request in pairs],
        np.int32,
    )
    drafts = np.zeros((len(pairs), max(1, windows.max())), np.int32)
    slots = np.array([request.slot for _, request in pairs], np.int32)
    lengths = drafter.propose(slots, texts, num_tokens, windows, drafts)
    return {
        row.id: draft[:length].tolist()
        for (row, _), draft, length in zip(pairs, drafts, lengths, strict=True)
    }


def _open(row: DraftedRow, request: _Request) -> Opened:
    request.stream = VerifyStream(len(row.text))
    return Opened(
        id=row.id,
        token_ids=row.text.tolist(),
        sample_key=request.sample_key,
        window=request.setting.window,
        coupled=request.setting.coupled,
        max_tokens=request.max_tokens,
    )


def _advance(row: DraftedRow, stream: VerifyStream) -> Verified | None:
    start = stream.num_tokens
    emitted = row.text[start:].tolist()
    stream.advance(emitted)
    return Verified(row.id, start, emitted) if emitted else None
