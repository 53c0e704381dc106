"""Drafting between two steps of an engine, for requests that have their own draft setting.

    a text drafter   drafts come from the request's own tokens, for example by `ngram`
    a draft model    drafts come from a drafter process that runs ahead; we verify what has arrived

After each step we send the emitted tokens to each drafter, read the drafts that it has sent, and
propose the pending ones. We never wait, because a step serves all requests: a request without
drafts decodes one token.

The history drafter may draft for the same requests (`expected`, `fuse`). All drafters guess tokens
of the same response, so the draft model receives the accepted tokens, whoever guessed them. We
compare its unused drafts with them too, to know how often it is right.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.histospec.acceptance import blended
from engines.histospec.budget import keep_likeliest
from engines.histospec.siblings import NO_SLOT
from engines.inference.drafting.draft_link import DraftLink
from engines.latency.expectation import expected_tokens
from engines.specactor.streams import Opened, Verified, VerifyStream, agreeing
from engines.specactor.text_drafters import TEXT_DRAFTERS, TextDrafter
from schemas.rollout import DraftSetting


class DraftedRow(NamedTuple):
    """One row of the running batch after a step."""

    row: int
    id: str
    num_sampled: int
    """Tokens that the step emitted; 0 while it computes the prompt."""
    text: np.ndarray
    """int32 [any]: tokens of the prompt and the response so far."""


@dataclass(slots=True)
class _Accuracy:
    """How often draft tokens were right, verified or not. Unknown ones do not count."""

    num_right: int = 0
    num_tried: int = 0


@dataclass(slots=True)
class _Request:
    setting: DraftSetting
    sample_key: int
    max_tokens: int
    """Most tokens of prompt and response together."""
    slot: int = NO_SLOT
    """Slot of its text drafter; `NO_SLOT` with a draft model."""
    stream: VerifyStream | None = None
    """Verifier's end of its stream; None while no connected drafter knows the request."""
    draft: list[int] = field(default_factory=list)
    """Tokens drafted for the running step, verified or not."""
    num_drafted: int = 0
    """Number of tokens at the start of `draft` that the running step verifies."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejections: int = 0
    accuracy: _Accuracy = field(default_factory=_Accuracy)

    def room(self, num_tokens: int) -> int:
        """Return the most tokens to draft after `num_tokens` tokens of prompt and response.

        A verification emits one token more than it accepts.
        """
        return max(0, min(self.setting.window, self.max_tokens - num_tokens - 1))


Pair = tuple[DraftedRow, _Request]


class RequestDrafting:
    """Drafting for the requests of one engine that have their own draft setting."""

    def __init__(self, engine: int, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._text_drafters = {name: make() for name, make in TEXT_DRAFTERS.items()}
        self._links: dict[str, DraftLink] = {}
        """Connection to each drafter, by name."""
        self._requests: dict[str, _Request] = {}
        self._accuracy: dict[str, _Accuracy] = defaultdict(_Accuracy)
        """How often each drafter's tokens were right."""

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
        self._requests[id] = _Request(setting, sample_key, max_tokens, slot)

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

    def propose(self, rows: Sequence[DraftedRow], max_draft_tokens: int) -> list[list[int]]:
        """Return the draft of each row, possibly empty; at most `max_draft_tokens` in all."""
        pairs = [(row, self._requests[row.id]) for row in rows]
        for row, request in pairs:
            # A request that the step left out has emitted nothing, and its draft still waits.
            if row.num_sampled and request.draft:
                self._observe(row, request)
        by_drafter: dict[str, list[Pair]] = defaultdict(list)
        for row, request in pairs:
            by_drafter[request.setting.drafter].append((row, request))
        drafts: dict[str, list[int]] = {}
        for name in by_drafter.keys() & self._text_drafters.keys():
            drafts |= _from_text(self._text_drafters[name], by_drafter.pop(name))
        drafts |= self._from_streams([pair for pairs in by_drafter.values() for pair in pairs])
        num_drafted = np.array([len(drafts[row.id]) for row in rows], np.int32)
        acceptances = np.array([self._acceptance(request) for _, request in pairs])
        windows = np.arange(1, num_drafted.max(initial=0) + 1)
        likely = acceptances[:, None] ** windows
        num_kept = keep_likeliest(likely, num_drafted, max_draft_tokens)
        for (row, request), num in zip(pairs, num_kept.tolist(), strict=True):
            request.draft, request.num_drafted = drafts[row.id][:num], num
        return [request.draft for _, request in pairs]

    def expected(self, rows: Sequence[DraftedRow]) -> list[float]:
        """Return how many tokens of each row's draft we expect to be accepted."""
        requests = [self._requests[row.id] for row in rows]
        return [expected_tokens(len(one.draft), self._acceptance(one)) - 1 for one in requests]

    def fuse(self, row: DraftedRow, other: list[int]) -> list[int]:
        """Return the better of two drafts of a row: ours if it starts with `other`, else `other`.

        `other`: the history's draft, of which more tokens are expected to be accepted.
        """
        request = self._requests[row.id]
        num_agreeing = agreeing(other, request.draft)
        if num_agreeing == len(other):
            return request.draft
        request.num_drafted = num_agreeing
        return other

    def _acceptance(self, request: _Request) -> float:
        """Return the probability that the request's next draft token is right. Its drafter's other
        requests serve as the prior, and one half as theirs."""
        own, others = request.accuracy, self._accuracy[request.setting.drafter]
        prior = blended(others.num_right, others.num_tried, 0.5)
        return blended(own.num_right, own.num_tried, prior)

    def _observe(self, row: DraftedRow, request: _Request) -> None:
        """Count how much of the last draft was right, from the emitted tokens."""
        num_drafted, num_accepted = request.num_drafted, row.num_sampled - 1
        num_right = min(num_accepted, num_drafted)
        if num_drafted:
            request.num_draft_tokens += num_drafted
            request.num_accepted_tokens += num_right
            request.num_rejections += num_accepted < num_drafted
        if num_drafted < len(request.draft):
            # The other drafter's draft was verified. Compare ours with the emitted tokens.
            emitted = row.text[len(row.text) - row.num_sampled :].tolist()
            num_right = agreeing(request.draft, emitted)
        num_tried = num_right + (num_right < min(len(request.draft), row.num_sampled))
        for accuracy in (request.accuracy, self._accuracy[request.setting.drafter]):
            accuracy.num_right += num_right
            accuracy.num_tried += num_tried

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
