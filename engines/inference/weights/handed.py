"""Weights that the trainer hands to an engine on the GPUs that they share, before its turn ends.

    asleep ── start ──► memory for weights ── update, buffer by buffer ── finish ──► there
                               └──── broken off ────┴──► abandoned when a file is loaded

The KV cache comes later, with the engines' turn, and the canary behind it.
"""

from typing import Any

from engines.inference.engine.parking import Memory


class HandedWeights:
    """An engine's side of a hand-over, call by call as vLLM's trainer makes them
    (`VLLMWeightSyncClient`). `llm`: vLLM's `AsyncLLM`."""

    def __init__(self, llm: Any, memory: Memory) -> None:
        self._llm = llm
        self._memory = memory
        self._under_way = False
        self._version: int | None = None
        """Policy version that is there."""

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info))

    async def start_weight_update(self) -> None:
        await self._abandon()
        self._version = None
        await self._memory.take_weights()
        self._under_way = True
        await self._llm.start_weight_update()

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest(update_info))

    async def finish_weight_update(self, policy_version: int) -> None:
        await self._llm.finish_weight_update(str(policy_version))
        self._under_way, self._version = False, policy_version

    async def are_of(self, policy_version: int) -> bool:
        """Whether they are there, for the one who asks first. What was broken off is abandoned."""
        await self._abandon()
        handed, self._version = self._version, None
        return handed == policy_version

    def forget(self) -> None:
        """Forget them: their memory has been left."""
        self._version = None

    async def _abandon(self) -> None:
        if self._under_way:
            await self._llm.collective_rpc("abandon_weight_update")
            self._under_way = False
