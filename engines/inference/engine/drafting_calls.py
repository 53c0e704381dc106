"""Calls to the drafting of an engine, from its front end.

V1 runner   the worker drafts and decides what is verified     `WorkerExtension`
V2 runner   the worker drafts, and the scheduler reserves room `WorkerExtension`, `scheduler`
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from refrain.schemas.config import EngineConfig
from refrain.schemas.counts import DraftingCounts
from refrain.schemas.engine import EngineSetup
from refrain.schemas.rollout import DraftProgress, RequestId, RolloutRequest

POLL_S = 1.0
"""Least seconds between two calls that fetch the progress of requests."""


class DraftingCalls:
    """Of an engine that drafts."""

    def __init__(self, llm: Any, config: EngineConfig) -> None:
        """`llm`: vLLM's `AsyncLLM`."""
        self._llm = llm
        self._is_v2 = config.rollout.model_runner == "v2"
        self._asked_s = 0.0
        self._progress: Mapping[str, tuple[int, int, int]] = {}

    async def install(self, config: EngineConfig, setup: EngineSetup, engine: int) -> None:
        given = config.model_dump_json(), setup.model_dump_json()
        await self._llm.collective_rpc("install_drafting", args=(*given, engine))
        if self._is_v2:
            await self._call_scheduler("reserve_room", *given)

    async def expect(self, prompt_keys: list[str]) -> None:
        """Prepare for requests for these prompts, which are on their way."""
        await self._llm.collective_rpc("expect_requests", args=(prompt_keys,))

    async def take_counts(self) -> DraftingCounts:
        """Return the counts since the last call."""
        counts, *_ = await self._llm.collective_rpc("take_drafting_counts")
        if self._is_v2:
            counts |= await self._call_scheduler("take_room_counts")
        # vLLM's channel has turned the tuple into a list.
        return DraftingCounts(**counts | {"step_costs": tuple(counts.get("step_costs", ()))})

    async def progress(self, requests: Sequence[RolloutRequest]) -> dict[RequestId, DraftProgress]:
        """Return the progress of requests that have their own draft setting. It may be `POLL_S`
        old, because a call holds up the engine between two steps."""
        now_s = time.monotonic()
        if now_s - self._asked_s > POLL_S:
            self._progress, *_ = await self._llm.collective_rpc("draft_progress")
            self._asked_s = now_s
        return {
            request.id: DraftProgress(request.drafting, *self._progress[str(request.id)])
            for request in requests
            if str(request.id) in self._progress
        }

    async def _call_scheduler(self, name: str, *args: Any) -> Any:
        core = self._llm.engine_core
        return await core.call_utility_async("call_scheduler", name, list(args))
