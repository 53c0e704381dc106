"""A rollout engine in virtual time, behind the interface of the real one."""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from refrain.engines.latency.interface import Latency
from refrain.engines.rollout.interface import EngineEvents
from refrain.engines.simulate.batching import ROUNDING_S, ChooseDrafting, VirtualBatch
from refrain.engines.simulate.member import DECODING, Acceptance, Replayed, SimulatedRequest
from refrain.engines.simulate.pace import Interval
from refrain.engines.simulate.turns import answer_s, turns_so_far
from refrain.schemas.counts import DraftingCounts, KVCounts
from refrain.schemas.drafting import HISTORY
from refrain.schemas.rollout import (
    DraftProgress,
    DraftSetting,
    FinishReason,
    Generated,
    RequestId,
    Rollout,
    RolloutRequest,
    SavedKV,
    Turn,
    VersionSpan,
)
from refrain.schemas.weights import PolicyWeights


def _at_once(_: int) -> float:
    return 0.0


@dataclass(frozen=True, slots=True)
class SwitchTimes:
    """Seconds in which an engine releases its GPUs to another layout or to the trainer, and takes
    them again."""

    wake_s: float = 0.0
    sleep_s: float = 0.0
    save_s: Callable[[int], float] = _at_once
    """Seconds to save the KV cache of so many context tokens."""
    ahead: bool = False
    """Whether the existing KV cache is saved ahead, while the requests go on."""
    load_s: Callable[[int], float] = _at_once
    """Seconds to load the saved KV cache of so many context tokens, before the next step."""


class VirtualEngine:
    """A simulated engine, which is given the response lengths and spends the time of its steps.

    - `lengths`: response tokens by request, cut at the request's `max_response_tokens`. A deferred
      request has the name of the step that drew it (`RolloutRequest.origin`).
    - `acceptances`: probabilities in [0, 1] that draft tokens are accepted, for all drafters or by
      drafter. Without one, every draft of the request is rejected.
    - `replays`: decode steps with drafts from history. Without them, the request has no drafts.
    - `turns`: recorded turns of conversations, by request.
    - `choose_drafting`: chooses the draft setting by the batch; then `set_drafting` is not called.
      A request with its own `drafting` setting keeps it.
    - `report_s`: interval of progress reports, so that policies run between finished rollouts. They
      include the drafting progress, except with history, as on real engines.
    - `sync_s`: seconds of loading weights.

    The engine reports a rollout as soon as it finishes. If it has no requests, `next_events` waits
    for the next submission. If no engine of a stage has any, `engines.simulate.clock` raises an
    error. The engine never dies, and its canary always passes.

    Deviations: a request that migrates or is copied keeps its whole tokens, but loses its fraction
    of the next token (`engines.simulate.member`). The other requests go on while KV caches are
    saved. A switch always saves all KV caches, and a race none, as between nodes.
    """

    node_id: str | None = None

    def __init__(
        self,
        index: int,
        tp_degree: int,
        latency: Latency,
        lengths: Mapping[RequestId, int],
        *,
        acceptances: Mapping[RequestId, Acceptance] | None = None,
        replays: Mapping[RequestId, Replayed] | None = None,
        turns: Mapping[RequestId, tuple[Turn, ...]] | None = None,
        choose_drafting: ChooseDrafting | None = None,
        max_num_seqs: int = 256,
        max_context_tokens: int | None = None,
        report_s: float | None = None,
        sync_s: float = 0.0,
        switch: SwitchTimes | None = None,
    ) -> None:
        self.index = index
        self.tp_degree = tp_degree
        self.parked = False
        self.num_withdrawn = 0
        self._switch = switch or SwitchTimes()
        self._lengths = lengths
        self._acceptances = acceptances or {}
        self._replays, self._turns = replays or {}, turns or {}
        self._batch = VirtualBatch(
            tp_degree, latency, max_num_seqs, max_context_tokens, choose_drafting
        )
        self.intervals: Sequence[Interval] = self._batch.intervals
        """Intervals in which the engine was busy, with the batch size. Otherwise it was idle."""
        self._report_s = report_s or math.inf
        self._reported_s = self._told_s = 0.0
        self._drafting: Mapping[RequestId, DraftProgress] = {}
        self._sync_s = sync_s
        self._version: int | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._ahead: dict[RequestId, int] = {}
        """Tokens whose KV cache was saved ahead, by request."""

    @property
    def num_preempted(self) -> int:
        return self._batch.num_preempted

    async def start(self) -> None:
        self._version, self.parked = None, False

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        assert self._version is not None, "load_weights comes first"
        assert not self.parked, f"engine {self.index} is parked"
        now_s = asyncio.get_running_loop().time()
        num_loaded = sum(request.kv.num_tokens for request in requests if request.kv)
        load_s = self._switch.load_s(num_loaded) if num_loaded else 0.0
        self._batch.add([self._member(r, now_s) for r in requests], now_s, load_s)
        self._rouse()

    async def withdraw(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Withdraw requests after the step in progress, with that step's tokens. Wait until their
        KV caches are saved."""
        now_s = asyncio.get_running_loop().time()
        members, free_s = self._batch.remove(ids, now_s)
        self.num_withdrawn += len(members)
        self._rouse()
        requests = [self._given_back(member, keep_kv) for member in members]
        ahead, self._ahead = self._ahead, {}
        num_saved = sum(r.kv.num_tokens - ahead.get(r.id, 0) for r in requests if r.kv)
        saved_s = free_s + (self._switch.save_s(num_saved) if num_saved else 0.0)
        if saved_s > now_s:
            await asyncio.sleep(saved_s - now_s)
        return requests

    async def precopy(self, ids: Sequence[RequestId]) -> SavedKV | None:
        """Save the existing KV cache of these requests ahead, so that `withdraw` saves only the
        rest."""
        if not self._switch.ahead:
            return None
        members, _ = self._batch.count(ids, asyncio.get_running_loop().time())
        given = (self._given_back(member, keep_kv=True) for member in members)
        self._ahead = {r.id: r.kv.num_tokens for r in given if r.kv}
        self._rouse()
        if num_tokens := sum(self._ahead.values()):
            await asyncio.sleep(self._switch.save_s(num_tokens))
        return SavedKV(f"engine {self.index}", num_tokens, self.tp_degree) if num_tokens else None

    async def expect_kv(self, saved: Sequence[SavedKV]) -> None:
        assert all(one.num_tokens for one in saved)

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Return copies of requests as `withdraw` does, but let the requests go on."""
        assert not keep_kv
        now_s = asyncio.get_running_loop().time()
        members, free_s = self._batch.count(ids, now_s)
        copies = [replace(m.request, generated=self._generated(m, m.done)) for m in members]
        self._rouse()
        if free_s > now_s:
            await asyncio.sleep(free_s - now_s)
        return copies

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        """Change the draft settings of single requests, otherwise as `set_drafting`."""
        self._batch.redraft(settings, asyncio.get_running_loop().time())
        self._rouse()

    async def set_drafting(self, setting: DraftSetting | None) -> None:
        """Change the draft setting after the step in progress; None turns drafting off.

        Raise ValueError when the window is below 1. A drafter that the latency model does not know
        raises ValueError too, at the latest when the next step is planned.
        """
        self._batch.set_drafting(setting, asyncio.get_running_loop().time())
        self._rouse()

    async def load_weights(self, weights: PolicyWeights) -> float:
        assert not len(self._batch), "the engine must be empty"
        await asyncio.sleep(self._sync_s)
        self._version = weights.policy_version
        return 0.0

    async def park(self) -> None:
        assert not len(self._batch), "the engine must be empty"
        self.parked = True

    async def sleep(self) -> None:
        assert not len(self._batch), "the engine must be empty"
        await asyncio.sleep(self._switch.sleep_s)
        self.parked, self._version = True, None

    async def wake(self) -> bool:
        assert self.parked, f"engine {self.index} is awake"
        await asyncio.sleep(self._switch.wake_s)
        self.parked = False
        return self._version is not None

    async def take_drafting_counts(self) -> DraftingCounts:
        """Return empty counts: the time of drafting is part of the step times."""
        return DraftingCounts()

    async def take_kv_counts(self) -> KVCounts:
        """Return empty counts: the time of a switch is given by `SwitchTimes`."""
        return KVCounts()

    async def next_events(self) -> EngineEvents:
        loop = asyncio.get_running_loop()
        while True:
            now_s = loop.time()
            self._batch.advance(now_s)
            finished = self._take_finished(now_s)
            if finished or self._due_s() <= now_s + ROUNDING_S:
                self._reported_s = now_s
                self._tell_drafting(now_s)
                return EngineEvents(finished, BatchProgress(self._batch, now_s), self._drafting)
            await self._sleep_until(self._next_s())

    async def kill(self) -> None:
        """Do nothing: a virtual engine never dies."""

    async def shutdown(self) -> None:
        self._rouse()

    def _tell_drafting(self, now_s: float) -> None:
        """Update the drafting progress, at most every `report_s`.

        This counts all requests, which is too slow for each event. Most events are a finish.
        """
        if now_s < self._told_s + self._report_s - ROUNDING_S:
            return
        self._told_s, steps = now_s, self._batch.steps_at(now_s)
        members = (self._batch.find(id) for id in self._batch.ids())
        drafted = (m for m in members if m and m.setting and m.setting.drafter != HISTORY)
        self._drafting = {member.request.id: member.progress(steps) for member in drafted}

    def _due_s(self) -> float:
        return self._reported_s + self._report_s if len(self._batch) else math.inf

    def _next_s(self) -> float:
        reported = self._batch.finished[0].finished_s if self._batch.finished else math.inf
        return min(self._batch.next_s, reported, self._due_s())

    async def _sleep_until(self, when_s: float) -> None:
        """Wait until this time, or until a call changes the batch."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_at(when_s, self._rouse) if when_s < math.inf else None
        try:
            await self._waiter
        finally:
            self._waiter = None
            if timer:
                timer.cancel()

    def _rouse(self) -> None:
        if self._waiter and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_finished(self, now_s: float) -> tuple[Rollout, ...]:
        taken = []
        finished = self._batch.finished
        while finished and finished[0].finished_s <= now_s + ROUNDING_S:
            taken.append(self._rollout(finished.popleft()))
        return tuple(taken)

    def _member(self, request: RolloutRequest, now_s: float) -> SimulatedRequest:
        id = request.origin
        length = min(self._lengths[id], request.max_response_tokens)
        before, turns = request.generated or Generated([], [], ()), self._turns.get(id, ())
        done = before.num_sampled
        assert done < length, f"{request.id} has {done} of its {length} tokens already"
        drafted = self._acceptances.get(id, 0.0), self._replays.get(id, DECODING)
        return SimulatedRequest(
            request,
            length,
            done,
            now_s,
            *drafted,
            has_kv=request.kv is not None,
            turns=turns,
            num_ended=len(before.turns),
            back_s=answer_s(before, turns),
            observed=before.num_observed,
        )

    def _given_back(self, member: SimulatedRequest, keep_kv: bool) -> RolloutRequest:
        request, kv = member.request, None
        if keep_kv and member.has_kv:
            num_tokens = member.context(0) - 1
            kv = SavedKV(f"engine {self.index}", num_tokens, self.tp_degree)
        return replace(request, generated=self._generated(member, member.done), kv=kv)

    def _rollout(self, member: SimulatedRequest) -> Rollout:
        cut = member.length == member.request.max_response_tokens
        return Rollout(
            request=member.request,
            generated=self._generated(member, member.length),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            engine=self.index,
            started_s=member.submitted_s,
            finished_s=member.finished_s,
            num_cached_tokens=member.request.kv.num_tokens if member.request.kv else 0,
        )

    def _generated(self, member: SimulatedRequest, num_tokens: int) -> Generated:
        """Return the request's tokens. Token n and its log-probability are n, because a range takes
        no memory."""
        assert self._version is not None
        before = member.request.generated or Generated([], [], ())
        spans = before.spans
        new = num_tokens - sum(span.num_tokens for span in spans)
        turns = member.turns
        if num_tokens < member.length:
            turns = turns_so_far(turns[: member.num_ended], member.back_s)
        if new:
            spans = (*spans, VersionSpan(self._version, new))
        return Generated(
            cast("list[int]", range(num_tokens + member.observed)),
            cast("list[float]", range(num_tokens)),
            spans,
            before.num_draft_tokens + member.num_draft_tokens,
            before.num_accepted_tokens + member.num_accepted_tokens,
            before.num_verifications + member.num_verifications,
            before.num_rejections + member.num_rejections,
            turns,
        )


class BatchProgress(Mapping[RequestId, int]):
    """Response tokens by request at the moment of an event, counted only on access.

    The requests are those on the engine at the time of access. So later requests are included, and
    requests that left are missing. After a change of drafting, the tokens are those at the change.
    """

    def __init__(self, batch: VirtualBatch, now_s: float) -> None:
        self._batch = batch
        self._steps = batch.steps_at(now_s)

    def __getitem__(self, id: RequestId) -> int:
        member = self._batch.find(id)
        if member is None:
            raise KeyError(id)
        return member.tokens(self._steps)

    def __iter__(self) -> Iterator[RequestId]:
        return iter(self._batch.ids())

    def __len__(self) -> int:
        return len(self._batch)
