"""Races on many engines, all ordered by one decision: how long do the events of engines wait?

    32 engines at work ─ copy, EXPORT_S ─► 32 free engines ─ submit, IMPORT_S ─► twice as fast

Engines that make up tokens replace vLLM. They take as long to save and to load keys and values as
an engine of a 32B model with long contexts. Each measures how long the coordinator takes from its
events to its next question. The coordinator is a run's.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from refrain.engines.rollout.coordinator import Coordinator
from refrain.engines.rollout.interface import EngineEvents
from refrain.engines.rollout.moves import Move, Race, RolloutView
from refrain.schemas.counts import DraftingCounts, KVCounts
from refrain.schemas.rollout import (
    DraftProgress,
    DraftSetting,
    FinishedRollout,
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    SavedKV,
    Split,
    VersionSpan,
)
from refrain.schemas.weights import PolicyWeights

NUM_ENGINES = 64
EXPORT_S, IMPORT_S = 0.5, 0.25
NUM_TOKENS = 240
_EVENT_S = 0.1
_TOKENS = 10
"""Tokens between two events, without another drafter."""
_RACE_FROM = 30
_TIMEOUT_S = 60.0
_OTHER = DraftSetting("other", 4)


class RacingEngine:
    """An engine that counts up from 0: its tokens are their positions."""

    tp_degree = 1
    node_id = "node"

    def __init__(self, index: int, export_s: float = EXPORT_S, import_s: float = IMPORT_S) -> None:
        self.index = index
        self.longest_hold_up_s = 0.0
        self._export_s, self._import_s = export_s, import_s
        self._told_s = float("inf")
        self._running: dict[RequestId, tuple[RolloutRequest, int]] = {}

    async def start(self) -> None:
        """Begin at another time than the other engines, as real ones do."""
        await asyncio.sleep(_EVENT_S * self.index / NUM_ENGINES)

    async def load_weights(self, weights: PolicyWeights) -> float:
        del weights
        await asyncio.sleep(_EVENT_S * self.index / NUM_ENGINES)
        return 0.0

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        if any(request.kv for request in requests):
            await asyncio.sleep(self._import_s)
        for request in requests:
            num_tokens = len(request.generated.token_ids) if request.generated else 0
            self._running[request.id] = request, num_tokens

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        if keep_kv:
            await asyncio.sleep(self._export_s)
        there = [self._running[id] for id in ids if id in self._running]
        return [
            replace(request, generated=_generated(num), kv=SavedKV("none", num, 1))
            for request, num in there
        ]

    async def withdraw(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        del keep_kv
        left = [self._running.pop(id) for id in ids if id in self._running]
        return [replace(request, generated=_generated(num)) for request, num in left]

    async def next_events(self) -> EngineEvents:
        self.longest_hold_up_s = max(self.longest_hold_up_s, time.perf_counter() - self._told_s)
        await asyncio.sleep(_EVENT_S)
        finished = tuple(self._step())
        progress = {id: num for id, (_, num) in self._running.items()}
        drafting = {
            id: DraftProgress(request.drafting) for id, (request, _) in self._running.items()
        }
        self._told_s = time.perf_counter()
        return EngineEvents(finished, progress, drafting)

    def _step(self) -> list[Rollout]:
        """Generate the tokens of the time between two events. Return what has finished."""
        for id, (request, num) in self._running.items():
            new = 2 * _TOKENS if request.drafting else _TOKENS
            self._running[id] = request, min(NUM_TOKENS, num + new)
        done = [id for id, (_, num) in self._running.items() if num == NUM_TOKENS]
        return [self._rollout(*self._running.pop(id)) for id in done]

    def _rollout(self, request: RolloutRequest, num: int) -> Rollout:
        return Rollout(request, _generated(num), FinishReason.STOP, self.index, 0.0, 1.0)

    async def take_drafting_counts(self) -> DraftingCounts:
        return DraftingCounts()

    async def take_kv_counts(self) -> KVCounts:
        return KVCounts()

    async def shutdown(self) -> None:
        self._running.clear()


class RaceAll:
    """A policy that races every request once, each on a free engine of its own."""

    def __init__(self) -> None:
        self._made = False

    def decide(self, view: RolloutView) -> Sequence[Move]:
        progress = [pair for engine in view.engines for pair in engine.progress.items()]
        if self._made or min((num for _, num in progress), default=0) < _RACE_FROM:
            return []
        self._made = True
        free = [engine.engine for engine in view.engines if not engine.progress]
        return [Race(id, to, _OTHER) for (id, _), to in zip(progress, free, strict=True)]


async def race_at_once(engines: Sequence[RacingEngine] | None = None) -> float:
    """Run the stage. Return the longest time in seconds that events of an engine waited."""
    engines = engines or [RacingEngine(i) for i in range(NUM_ENGINES)]
    num_raced, finished = len(engines) // 2, []

    async def keep(rollouts: Sequence[FinishedRollout | Rollout]) -> None:
        finished.extend(rollouts)

    coordinator = Coordinator(engines)
    await coordinator.start()
    assigned = [(i, _request(i)) for i in range(num_raced)]
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            outcome = await coordinator.roll_out(
                assigned,
                keep,
                weights=PolicyWeights(0, b"", ()),
                policies=[RaceAll()],
                moves_kv=lambda *_: True,
            )
    finally:
        await coordinator.shutdown()
    moves = outcome.moves
    assert moves.num_raced == moves.num_raced_with_kv == moves.num_races_won == num_raced
    tokens = list(range(NUM_TOKENS))
    assert [list(rollout.generated.token_ids) for rollout in finished] == [tokens] * num_raced
    return max(engine.longest_hold_up_s for engine in engines)


def _request(index: int) -> RolloutRequest:
    id = RequestId(Split.TRAIN, 1, f"prompt-{index}", 0)
    return RolloutRequest(id, (1, 2, 3), sample_key=index, max_response_tokens=NUM_TOKENS)


def _generated(num_tokens: int) -> Generated:
    logprobs = [-1.0] * num_tokens
    return Generated(list(range(num_tokens)), logprobs, (VersionSpan(0, num_tokens),))
