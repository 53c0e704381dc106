"""Engines with slow steps, so that tests can catch a response before it ends on a fast machine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.inference.engine.vllm_engine import VLLMEngine

STEP_S = 0.02
"""Least seconds of a slow step: 50 tokens take a second."""


class PacedEngine(VLLMEngine):
    async def set_pace(self, step_s: float) -> None:
        await self._llm.collective_rpc("set_pace", args=(step_s,))

    async def dial(self, temperature: float, gate: bool) -> None:
        """Sample at `temperature` from now on, with drafters that have learnt nothing yet."""
        rollout = self._config.rollout.model_copy(update={"temperature": temperature})
        drafting = self._config.drafting.model_copy(update={"gate": gate})
        changes = {"rollout": rollout, "drafting": drafting}
        self._config = self._config.model_copy(update=changes)
        if self._config.speculates:
            given = self._config.model_dump_json(), self._setup.model_dump_json(), self.index
            await self.call_drafting("begin_drafting", *given)

    async def count_steps(self) -> None:
        await self._llm.collective_rpc("count_steps")

    async def take_step_counts(self) -> dict[str, int]:
        (counts,) = await self._llm.collective_rpc("take_step_counts")
        return counts

    def _engine_args(self, on_cpu: bool) -> dict[str, Any]:
        extension = "tests.inference.paced_worker.PacedWorker"
        return super()._engine_args(on_cpu) | {"worker_extension_cls": extension}


async def set_pace(engine: RayEngine, step_s: float) -> None:
    """Make each step of this engine last at least `step_s`, until the engine restarts."""
    await engine.actor.set_pace.remote(step_s)


async def dial(engines: Sequence[RayEngine], temperature: float, *, gate: bool = False) -> None:
    """Sample at `temperature`, and let drafters forget what they learnt. Without `gate` they draft
    even where it saves nothing."""
    for engine in engines:
        await engine.actor.dial.remote(temperature, gate)


@asynccontextmanager
async def paced(engines: Sequence[RayEngine]) -> AsyncIterator[None]:
    """Make the steps of these engines slow inside the context."""
    for engine in engines:
        await set_pace(engine, STEP_S)
    yield
    for engine in engines:
        await set_pace(engine, 0.0)
