"""An engine for a loop of your own: it runs beside your code, without Ray and the coordinator."""

import gc
from collections.abc import Mapping, Sequence

from refrain.engines.bounded import wait_while_moving
from refrain.engines.inference.engine.vllm_engine import VLLMEngine
from refrain.schemas.rollout import RequestId, Rollout, RolloutRequest


class InProcessEngine(VLLMEngine):
    """An engine whose rollouts you await. vLLM computes in a process of its own."""

    async def start(self) -> None:
        # Unlike an actor, this process has more to do, so collect its garbage as usual.
        await self._start()

    async def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Return the rollouts of the requests, in their order.

        Raise RuntimeError if vLLM fails, and TimeoutError if it generates no token for
        `rollout.stall_timeout_s`.
        """
        await self.submit(requests)
        stall_s = self._config.rollout.stall_timeout_s
        await wait_while_moving(self._drained.wait(), self._num_tokens, stall_s)
        if self._failure is not None:
            raise RuntimeError(f"vLLM failed: {self._failure!r}") from self._failure
        finished = {rollout.id: rollout for rollout in self._finished}
        self._finished.clear()
        return [finished[request.id] for request in requests]

    async def _num_tokens(self) -> Mapping[RequestId, int]:
        return self._progress()

    async def shutdown(self) -> None:
        await super().shutdown()
        del self._llm, self._saving, self._memory, self._handed
        # vLLM has frozen its objects. If they live until Python ends, it reports them as leaks.
        gc.unfreeze()
        gc.collect()
