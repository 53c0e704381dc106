"""An engine in memory: every token is a hash of (sample key, position, policy version)."""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import replace

from engines.rollout.interface import EngineDied, EngineEvents, WeightSyncError
from schemas.rollout import (
    DraftingCounts,
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    Split,
    VersionSpan,
)
from schemas.weights import PolicyWeights


def request(name: str, num_tokens: int, sample_index: int = 0, step: int = 1) -> RolloutRequest:
    """A request whose response will have `num_tokens` tokens."""
    id = RequestId(Split.TRAIN, step, name, sample_index)
    return RolloutRequest(id, (1, 2, 3), sample_key=hash(name), max_response_tokens=num_tokens)


def weights(version: int = 0) -> PolicyWeights:
    return PolicyWeights(version, b"", ())


class FakeEngine:
    """One token per running request and tick. `die_at_tick` kills it once, `wrong` fails syncs,
    `dies_in` names a method whose first call finds it dead."""

    def __init__(
        self,
        index: int,
        die_at_tick: int | None = None,
        wrong: bool = False,
        dies_in: str | None = None,
    ) -> None:
        self.index = index
        self.dies_in = dies_in
        self.die_at_tick = die_at_tick
        self.always_dies = False
        self.wrong = wrong
        self.num_starts = 0
        self.running: dict[RequestId, tuple[RolloutRequest, list[int]]] = {}
        self.version: int | None = None
        self.tick = 0
        self.submitted: list[RequestId] = []

    async def start(self) -> None:
        self.num_starts += 1
        self.dies_in = None if self.dies_in == "dead" else self.dies_in
        self.running, self.version, self.tick = {}, None, 0

    def _meet_death(self, method: str) -> None:
        if self.dies_in == method or (self.dies_in == "dead" and method == "next_events"):
            # The call that meets it fails, and so does the next look at the engine.
            self.dies_in = "dead"
            raise EngineDied(self.index, f"killed in {method}")

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._meet_death("submit")
        assert self.version is not None
        for r in requests:
            self.submitted.append(r.id)
            self.running[r.id] = (r, list(r.generated.token_ids) if r.generated else [])

    async def withdraw(self, ids: Sequence[RequestId]) -> list[RolloutRequest]:
        self._meet_death("withdraw")
        taken = [self.running.pop(id) for id in ids if id in self.running]
        return [replace(r, generated=self._generated(r, t)) for r, t in taken]

    async def load_weights(self, new: PolicyWeights) -> float:
        self._meet_death("load_weights")
        assert not self.running
        if self.wrong:
            raise WeightSyncError(f"engine {self.index} differs")
        self.version = new.policy_version
        return 0.0

    async def next_events(self) -> EngineEvents:
        await asyncio.sleep(0.001)
        self._meet_death("next_events")
        self.tick += 1
        if self.die_at_tick == self.tick and (self.num_starts == 1 or self.always_dies):
            raise EngineDied(self.index, "killed by the test")
        finished = []
        for r, tokens in list(self.running.values()):
            text = f"{r.sample_key}/{len(tokens)}/{self.version}".encode()
            tokens.append(hashlib.blake2b(text, digest_size=2).digest()[0])
            if len(tokens) == r.max_response_tokens:
                del self.running[r.id]
                generated = self._generated(r, tokens)
                finished.append(Rollout(r, generated, FinishReason.STOP, self.index, 0.0, 1.0))
        return EngineEvents(
            tuple(finished), {id: len(tokens) for id, (_, tokens) in self.running.items()}
        )

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts(num_steps=self.tick, draft_s=0.5)

    async def shutdown(self) -> None:
        self.running = {}

    def _generated(self, r: RolloutRequest, tokens: list[int]) -> Generated:
        assert self.version is not None
        before = r.generated.spans if r.generated else ()
        new = len(tokens) - sum(span.num_tokens for span in before)
        spans = (*before, VersionSpan(self.version, new)) if new else before
        return Generated(list(tokens), [-1.0] * len(tokens), spans)
