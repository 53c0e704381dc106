"""The `Engine` interface over a Ray actor. Each call has a time limit; each death names a cause."""

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from refrain.engines.actors import ActorError, ActorGone, RemoteActor
from refrain.engines.bounded import LoopTurns, together
from refrain.engines.gpus.cleanup import END_S, CleanupActor, Marked
from refrain.engines.gpus.place import NoPlace, Place
from refrain.engines.gpus.reservation import ReservedGpus
from refrain.engines.inference.engine.last_error import tells_cause
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.engines.rollout.interface import EngineDied, EngineEvents, EngineGone, WeightSyncError
from refrain.schemas.config import EngineConfig
from refrain.schemas.counts import DraftingCounts, KVCounts
from refrain.schemas.engine import ALONE, EngineSetup
from refrain.schemas.rollout import DraftSetting, RequestId, RolloutRequest, SavedKV
from refrain.schemas.weights import PolicyWeights

ANSWER_S = 10.0
"""Longest time to wait until a failed engine reports its cause."""
SUBMITTED_AT_ONCE = 512
"""Requests per call. Ray serializes their prompts on the caller's event loop, which blocks."""

_TURNS = LoopTurns(4)
"""Ray needs about 0.3 ms to begin a call, and a stage begins calls to all engines at once."""


class RayEngine:
    """An engine that runs as a Ray actor. After a death, `start` replaces the actor."""

    def __init__(
        self,
        index: int,
        config: EngineConfig,
        num_gpus: int,
        engine_class: type[VLLMEngine] = VLLMEngine,
        gpus: ReservedGpus | None = None,
        near: str | None = None,
        setup: EngineSetup = ALONE,
    ) -> None:
        """Describe an engine; `start` starts it.

        `num_gpus`: GPUs of its own, on node `near` if they are free there. `gpus`: GPUs that it
        shares with other engines; it runs on their node.
        """
        self.index = index
        self.tp_degree = config.rollout.tp_degree
        self._engine_class = engine_class
        self._config = config
        self._num_gpus = num_gpus
        self._gpus = gpus
        self._near = near
        self._setup = setup
        self._place: Place | None = None
        self._actor: RemoteActor | None = None
        self._last_news_s = 0.0
        self._last_progress: dict[RequestId, int] = {}
        self._unfinished: set[RequestId] = set()
        self._num_received = 0
        self._drafters: dict[str, str] = {}
        self._started = False
        self._marked: Marked | None = None
        """Processes that may survive the actor."""

    @property
    def actor(self) -> Any:
        """Ray's handle of the actor, or None if the engine is not running."""
        return self._actor and self._actor.handle

    @property
    def node_id(self) -> str | None:
        return self._marked.node_id if self._marked else None

    @property
    def stall_timeout_s(self) -> float:
        return self._config.rollout.stall_timeout_s

    async def start(self) -> None:
        await self.kill()
        self._started = False
        self._unfinished.clear()
        self._num_received = 0
        node_id = self._gpus.node_id if self._gpus else None
        place = self._place = self._place or Place(self._num_gpus, node_id, self._near)
        self._actor = RemoteActor(
            f"rollout engine {self.index}",
            self._engine_class,
            self.index,
            self._config,
            self._setup,
            max_concurrency=64,
            **place.options,
        )
        try:
            async with together() as group:
                watch = group.create_task(place.watch())
                mark, limit_s = uuid4().hex, self._config.rollout.start_timeout_s
                self._marked = await self._call("mark_processes", mark, timeout_s=limit_s)
                await self._call("start", timeout_s=self._config.rollout.start_timeout_s)
                watch.cancel()
        except (EngineDied, NoPlace) as error:
            # If the node died, Ray may fail this call before it reports the node as dead.
            if why := str(error) if isinstance(error, NoPlace) else await place.look():
                await self._leave(place)
                raise EngineGone(self.index, why) from error
            raise
        self._started = True
        if self._drafters:
            await self._call("call_drafting", "connect_drafters", dict(self._drafters))

    async def kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor:
            actor.kill()
        marked, self._marked = self._marked, None
        if marked is None:
            return
        name = f"end of rollout engine {self.index}"
        cleanup_actor = RemoteActor(name, CleanupActor, node_id=marked.node_id)
        try:
            await cleanup_actor.call("end", marked, timeout_s=ANSWER_S + 2 * END_S)
        except ActorGone:
            pass  # The node is dead, and all its processes with it.
        except ActorError as error:
            self._marked = marked
            raise EngineDied(self.index, f"its processes did not end: {error.why}") from error
        finally:
            cleanup_actor.kill()

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        self._unfinished.update(request.id for request in requests)
        self._last_news_s = time.monotonic()
        async with self._living() as actor:
            for first in range(0, len(requests), SUBMITTED_AT_ONCE):
                batch = list(requests[first : first + SUBMITTED_AT_ONCE])
                await actor.call("submit", batch, timeout_s=self.stall_timeout_s)

    async def withdraw(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        withdrawn: list[RolloutRequest] = await self._call("withdraw", list(ids), keep_kv=keep_kv)
        self._unfinished.difference_update(request.id for request in withdrawn)
        return withdrawn

    async def precopy(self, ids: Sequence[RequestId]) -> SavedKV | None:
        return await self._call("precopy", list(ids))

    async def expect_kv(self, saved: Sequence[SavedKV]) -> None:
        await self._call("expect_kv", list(saved))

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        return await self._call("copy", list(ids), keep_kv=keep_kv)

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        await self._call("redraft", dict(settings))

    async def connect_drafters(self, addresses: Mapping[str, str]) -> None:
        """Connect to draft models, now and after each restart. `addresses`: name -> address."""
        self._drafters.update(addresses)
        if self._started:
            await self._call("call_drafting", "connect_drafters", dict(addresses))

    async def load_draft_head(self, directory: Path) -> None:
        """Draft with the head in this directory, now and after each restart. No token changes, so
        requests may be running. The engine's node must see the directory."""
        specactor = self._config.specactor.model_copy(update={"head": directory})
        self._config = self._config.model_copy(update={"specactor": specactor})
        if self._started:
            await self._call("call_drafting", "load_draft_head", str(directory))

    async def load_weights(self, weights: PolicyWeights) -> float:
        if weights.draft_head:
            await self.load_draft_head(weights.draft_head)
        return await self._call("load_weights", weights)

    async def park(self) -> None:
        await self._call("park")

    async def sleep(self) -> None:
        await self._call("sleep")

    async def wake(self) -> bool:
        return await self._call("wake")

    async def take_kv_counts(self) -> KVCounts:
        """Return the counts of saved and loaded keys and values since the last call."""
        return await self._call("take_kv_counts")

    async def take_drafting_counts(self) -> DraftingCounts:
        counts: DraftingCounts = await self._call("take_drafting_counts")
        if counts.learnt:
            self._setup = self._setup.model_copy(update={"learnt": counts.learnt})
        return counts

    async def next_events(self) -> EngineEvents:
        async with self._living() as actor:
            events, rows = await actor.call_with_reference(
                "next_events", self._num_received, timeout_s=self.stall_timeout_s
            )
        events = replace(events, finished=tuple(replace(r, rows=rows) for r in events.finished))
        self._num_received += len(events.finished)
        self._unfinished.difference_update(rollout.id for rollout in events.finished)
        now, progress = time.monotonic(), dict(events.progress)
        moves = events.finished or progress != self._last_progress
        # An environment's answer is bounded in time by itself.
        if moves or events.num_waiting or not self._unfinished:
            self._last_news_s, self._last_progress = now, progress
        elif now - self._last_news_s > self._config.rollout.stall_timeout_s:
            raise EngineDied(
                self.index,
                f"{len(self._unfinished)} requests without a new token for "
                f"{now - self._last_news_s:.0f} s (rollout.stall_timeout_s)",
            )
        return events

    async def shutdown(self) -> None:
        actor, self._actor, self._started = self._actor, None, False
        if actor:
            await actor.stop()
        if self._place:
            await self._leave(self._place)

    async def _leave(self, place: Place) -> None:
        actor, self._actor, self._place = self._actor, None, None
        if actor:
            actor.kill()
        await place.give_back()

    async def _call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method of the actor. Raise as `_living` does."""
        timeout_s = timeout_s or self.stall_timeout_s
        async with self._living() as actor:
            return await actor.call(method, *args, timeout_s=timeout_s, **kwargs)

    @asynccontextmanager
    async def _living(self) -> AsyncGenerator[RemoteActor]:
        """Yield the actor, for calls.

        Raise `WeightSyncError` if a call does, and `EngineDied` for any other failure.
        """
        if (actor := self._actor) is None:
            raise EngineDied(self.index, "it was not started")
        await _TURNS.take()
        try:
            yield actor
        except ActorError as error:
            if isinstance(error.cause, WeightSyncError):
                raise error.cause from error
            raise await self._death(actor, error) from error

    async def _death(self, actor: RemoteActor, error: ActorError) -> EngineDied:
        """Return the error to raise for a dead engine, with the cause of death if one is known."""
        if error.cause is None or tells_cause(error.why):
            return EngineDied(self.index, error.why, error.why if error.cause else "")
        root = ""
        with suppress(ActorError):
            root = await actor.call("last_error", timeout_s=ANSWER_S)
        return EngineDied(self.index, f"{error.why} {root and f'It was: {root}'}".strip(), root)
