"""Journal of open conversations: their answered turns, in the run's store.

    environment answers ─► note ─► every 0.1 s ─► store ─┬─ the rollout's row comes: its turns go
                                                         └─ the driver dies ─► --resume
                                                                                  │
    engine continues after the last turn ◄── request with the turns so far ◄──────┤
    actor repeats no call ◄── answers to these turns ◄────────────────────────────┘

The store may lack the turns of the last moment. Engines draw these again, with the same tokens. So
nobody waits for the journal, and it writes less often if writes would take the store's time.
"""

import asyncio
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, chain, groupby, pairwise

from refrain.engines.environment.pool import parsed_answer
from refrain.engines.store.actor import StoreClient
from refrain.engines.store.turns import RecordedTurn, by_sample, turn_rows
from refrain.schemas.environment import EnvironmentAnswer
from refrain.schemas.rollout import Generated, RequestId, VersionSpan

WRITE_EVERY_S = 0.1
"""Seconds from a turn to the write that has it, and between two writes."""
MAX_SHARE = 0.025
"""Share of the store's time from which on writes come less often."""
LONGEST_PAUSE_S = 0.4
"""Longest time between two writes. On a busy machine a write may take long, but a turn is lost if
the next one ends before it."""


class Journal:
    """Turns of a run's open conversations on their way to the store."""

    def __init__(self, store: StoreClient) -> None:
        self._store = store
        self._noted: list[RecordedTurn] = []
        """Turns that no write has yet."""
        self._num_noted = self._num_written = 0
        """Turns so far."""
        self._writing: asyncio.Task[None] | None = None
        self._wrote = asyncio.Event()
        """Set after the next write, and replaced."""
        self._pause_s = WRITE_EVERY_S
        self.store_s = 0.0
        """Seconds that the store has spent on writes."""

    async def conversations(self) -> dict[RequestId, list[RecordedTurn]]:
        """Return the turns of all open conversations that the store has."""
        return by_sample(await self._store.call("open_turns"))

    def note(
        self,
        sample: RequestId,
        generated: Generated,
        answers: Sequence[EnvironmentAnswer],
        first: int,
    ) -> None:
        """Write the turns of a conversation from number `first` on, soon. All have an answer.

        Raise the error that ended the last write.
        """
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        answered = enumerate(zip(parts_of(generated), answers, strict=True))
        turns = [
            RecordedTurn(sample, number, part, json.dumps(asdict(answer)))
            for number, (part, answer) in answered
            if number >= first
        ]
        self._noted += turns
        self._num_noted += len(turns)
        self._writing = self._writing or asyncio.create_task(self._write())

    async def close(self) -> None:
        """Write what is left."""
        if self._writing is not None:
            # The caller may be cancelled, but not the write.
            await asyncio.shield(self._writing)

    async def written(self) -> None:
        """Wait until the store has all turns that were noted so far. Raise the error of a write."""
        number = self._num_noted
        while self._num_written < number:
            assert self._writing is not None
            if self._writing.done():
                self._writing.result()
            # Not for `_writing`: other conversations go on, so it may never end.
            await self._wrote.wait()

    async def _write(self) -> None:
        try:
            while self._noted:
                await asyncio.sleep(self._pause_s)
                noted, self._noted = self._noted, []
                took_s = await self._store.call("add_turns", turn_rows(noted))
                self.store_s += took_s
                self._pause_s = min(max(WRITE_EVERY_S, took_s / MAX_SHARE), LONGEST_PAUSE_S)
                self._num_written += len(noted)
                self._wake()
        finally:
            self._wake()

    def _wake(self) -> None:
        self._wrote.set()
        self._wrote = asyncio.Event()


def answer_of(turn: RecordedTurn) -> EnvironmentAnswer:
    """Return the environment's answer to a recorded turn."""
    return parsed_answer(json.loads(turn.answer))


def parts_of(generated: Generated) -> list[Generated]:
    """Return a response in parts, one for each turn. All turns have an answer. Each part has the
    counts of the whole."""
    tokens = accumulate((turn.num_tokens for turn in generated.turns), initial=0)
    sampled = accumulate((turn.num_sampled for turn in generated.turns), initial=0)
    return [
        replace(
            generated,
            token_ids=generated.token_ids[begin:end],
            inference_logprobs=generated.inference_logprobs[first:last],
            spans=tuple(_cut(generated.spans, first, last)),
            turns=(turn,),
            score=None,
        )
        for turn, (begin, end), (first, last) in zip(
            generated.turns, pairwise(tokens), pairwise(sampled), strict=True
        )
    ]


def joined_parts(parts: Sequence[Generated], *, keeps_times: bool = False) -> Generated:
    """Return the response that has these parts. `keeps_times`: keep the times at which its turns
    ended. Drop them if an earlier process saw these turns end."""
    spans = chain.from_iterable(part.spans for part in parts)
    return replace(
        parts[-1],
        token_ids=array("i", chain.from_iterable(part.token_ids for part in parts)),
        inference_logprobs=array("f", chain.from_iterable(p.inference_logprobs for p in parts)),
        spans=tuple(
            VersionSpan(version, sum(span.num_tokens for span in own))
            for version, own in groupby(spans, lambda span: span.policy_version)
        ),
        turns=tuple(
            turn if keeps_times else replace(turn, ended_s=None)
            for part in parts
            for turn in part.turns
        ),
    )


def _cut(spans: Sequence[VersionSpan], first: int, last: int) -> Iterator[VersionSpan]:
    """Return the spans of the sampled tokens from `first` up to `last`."""
    ends = accumulate((span.num_tokens for span in spans), initial=0)
    for span, (begin, end) in zip(spans, pairwise(ends), strict=True):
        num_tokens = min(last, end) - max(first, begin)
        if num_tokens > 0:
            yield VersionSpan(span.policy_version, num_tokens)
