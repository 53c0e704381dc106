"""Drafting for requests that have a setting of their own, in one engine, between two steps.

    with `ngram`          from their own text
    with a draft model    by a process of that, which drafts ahead: what has arrived is verified

Another drafter may draft for them beside (`expected`, `fuse`): of one response all guess the same
tokens, so the model hears what was accepted whoever guessed it, and how often it is right is known
from what it would have said.

Each drafter is told what was emitted, what it has sent is read, and what is pending is proposed.
Nobody is waited for, as a step is all requests': one whose drafts are not there is decoded plainly.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from engines.histospec.acceptance import PRIOR_WEIGHT
from engines.histospec.budget import keep_likeliest
from engines.histospec.siblings import NO_SLOT
from engines.inference.drafting.draft_link import DraftLink
from engines.specactor.expectation import expected_tokens
from engines.specactor.ngram import NgramDrafter
from engines.specactor.streams import Opened, Verified, VerifyStream, agreeing
from schemas.drafting import NGRAM
from schemas.rollout import DraftSetting


class DraftedRow(NamedTuple):
    """A row of the running batch after a step."""

    row: int
    id: str
    num_sampled: int
    """Tokens that the step emitted; 0: still in its prompt."""
    text: np.ndarray
    """int32 [any]: prompt and response so far."""


@dataclass(slots=True)
class _Worth:
    """How often draft tokens were right, of those that it is known of: whether or not they were
    verified."""

    num_right: int = 0
    num_tried: int = 0

    def of(self, one: "_Worth") -> float:
        """Probability that the next token of a request is right, these counts being all
        requests'."""
        prior = (self.num_right + PRIOR_WEIGHT / 2) / (self.num_tried + PRIOR_WEIGHT)
        return (one.num_right + PRIOR_WEIGHT * prior) / (one.num_tried + PRIOR_WEIGHT)


@dataclass(slots=True)
class _Request:
    setting: DraftSetting
    sample_key: int
    max_tokens: int
    """Prompt and response, at most."""
    slot: int = NO_SLOT
    """Slot of its text, where it drafts from that."""
    stream: VerifyStream | None = None
    """Verifier's end of its stream; None: no drafter knows of it yet."""
    draft: list[int] = field(default_factory=list)
    """Tokens drafted for the step that runs, verified or not."""
    num_drafted: int = 0
    """Tokens of it that are verified."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_rejections: int = 0
    worth: _Worth = field(default_factory=_Worth)

    @property
    def acceptance_rate(self) -> float:
        """Share of its drafts that was accepted, which a few dozen of them outweigh a guess of."""
        tried = self.num_draft_tokens + PRIOR_WEIGHT
        return (self.num_accepted_tokens + PRIOR_WEIGHT / 2) / tried

    def room(self, num_tokens: int) -> int:
        """Draft tokens at most after so many. A verification emits one token more than it
        accepts."""
        return max(0, min(self.setting.window, self.max_tokens - num_tokens - 1))


Pair = tuple[DraftedRow, _Request]


def _num_kept(
    pairs: Sequence[Pair], drafts: Mapping[str, Sequence[int]], max_tokens: int
) -> np.ndarray:
    """Draft tokens of each row that are verified: the likeliest, as each request's were."""
    num_drafted = np.array([len(drafts[row.id]) for row, _ in pairs], np.int32)
    rates = np.array([request.acceptance_rate for _, request in pairs])
    windows = np.arange(1, num_drafted.max(initial=0) + 1)
    return keep_likeliest(rates[:, None] ** windows, num_drafted, max_tokens)


class RequestDrafting:
    """One engine's."""

    def __init__(self, engine: int, vocab_size: int) -> None:
        self._engine, self._vocab_size = engine, vocab_size
        self._ngram = NgramDrafter()
        self._links: dict[str, DraftLink] = {}
        """Links by drafter."""
        self._requests: dict[str, _Request] = {}
        self._worth: dict[str, _Worth] = defaultdict(_Worth)
        """Worth of each drafter's tokens."""

    def connect(self, addresses: Mapping[str, str]) -> None:
        """Reach these drafters there from now on. Their requests are opened anew."""
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
        slot = self._ngram.add() if setting.drafter == NGRAM else NO_SLOT
        self._requests[id] = _Request(setting, sample_key, max_tokens, slot)

    def end(self, ids: Collection[str]) -> None:
        for id in ids:
            request = self._requests.pop(id, None)
            if request and request.setting.drafter == NGRAM:
                self._ngram.index.remove(request.slot)
            elif request and request.stream:
                self._links[request.setting.drafter].close_streams([id])

    def end_others(self, ids: Collection[str]) -> None:
        """Forget every request that is not among these."""
        self.end(self._requests.keys() - set(ids))

    def progress(self) -> dict[str, tuple[int, int, int]]:
        """(drafted, accepted) tokens of each request, and its drafts of which one was rejected."""
        return {
            id: (r.num_draft_tokens, r.num_accepted_tokens, r.num_rejections)
            for id, r in self._requests.items()
        }

    def propose(self, rows: Sequence[DraftedRow], max_draft_tokens: int) -> list[list[int]]:
        """Draft tokens of each row, possibly none; at most `max_draft_tokens` in all."""
        pairs = [(row, self._requests[row.id]) for row in rows]
        for row, request in pairs:
            # A request that was put off while its draft waited has emitted nothing.
            if row.num_sampled and request.draft:
                self._observe(row, request)
        drafts = self._from_text([pair for pair in pairs if pair[1].setting.drafter == NGRAM])
        drafts |= self._from_streams([p for p in pairs if p[1].setting.drafter != NGRAM])
        num_kept = _num_kept(pairs, drafts, max_draft_tokens).tolist()
        for (row, request), num in zip(pairs, num_kept, strict=True):
            request.draft, request.num_drafted = drafts[row.id][:num], num
        return [request.draft for _, request in pairs]

    def expected(self, rows: Sequence[DraftedRow]) -> list[float]:
        """Tokens of each row's draft that are expected to be accepted."""
        requests = [self._requests[row.id] for row in rows]
        return [
            expected_tokens(len(one.draft), self._worth[one.setting.drafter].of(one.worth)) - 1
            for one in requests
        ]

    def fuse(self, row: DraftedRow, other: list[int]) -> list[int]:
        """Draft of a row for which another drafter has drafted too, what is worth more: that one,
        or this one's, where it begins with it."""
        request = self._requests[row.id]
        num_agreeing = agreeing(other, request.draft)
        if num_agreeing == len(other):
            return request.draft
        request.num_drafted = num_agreeing
        return other

    def _observe(self, row: DraftedRow, request: _Request) -> None:
        """Take in what the last step has emitted."""
        num_drafted, num_accepted = request.num_drafted, row.num_sampled - 1
        num_right = min(num_accepted, num_drafted)
        if num_drafted:
            request.num_draft_tokens += num_drafted
            request.num_accepted_tokens += num_right
            request.num_rejections += num_accepted < num_drafted
        if num_drafted < len(request.draft):
            # The other drafter's was verified, and tells of this one.
            emitted = row.text[len(row.text) - row.num_sampled :].tolist()
            num_right = agreeing(request.draft, emitted)
        num_tried = num_right + (num_right < min(len(request.draft), row.num_sampled))
        for worth in (request.worth, self._worth[request.setting.drafter]):
            worth.num_right += num_right
            worth.num_tried += num_tried

    def _from_text(self, pairs: Sequence[Pair]) -> dict[str, list[int]]:
        if not pairs:
            return {}
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
        lengths = self._ngram.propose(slots, texts, num_tokens, windows, drafts)
        return {
            row.id: draft[:length].tolist()
            for (row, _), draft, length in zip(pairs, drafts, lengths, strict=True)
        }

    def _from_streams(self, pairs: Sequence[Pair]) -> dict[str, list[int]]:
        """Tell what was verified; what is pending."""
        if not pairs:
            return {}
        opened: dict[str, list[Opened]] = defaultdict(list)
        verified: dict[str, list[Verified]] = defaultdict(list)
        behind = {drafter for drafter, link in self._links.items() if not link.writable}
        for row, request in pairs:
            if request.setting.drafter in behind:
                # What it does not hear now it could not make up for.
                request.stream = None
            elif request.stream is not None:
                if told := _advance(row, request.stream):
                    verified[request.setting.drafter].append(told)
            else:
                # Also where its prompt is still being computed, as the drafter's is meanwhile.
                opened[request.setting.drafter].append(_open(row, request))
        for drafter in self._links.keys() - behind:
            self._links[drafter].send(opened[drafter], verified[drafter])
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
                # It may have ended, or be drafted for by another meanwhile.
                known = request and request.setting.drafter == drafter and told.id in texts
                if known and request.stream is not None:
                    request.stream.receive(told, texts[told.id])


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
