"""The engine's side of a hand-over: take weights from the trainer on the GPUs that they share.

    asleep ── start ──► allocate weights ── update, buffer by buffer ── finish ──► weights are there
                              └───── interrupted ─────┴──► abandoned before a file is loaded

This happens before the trainer's turn on the GPUs ends. The KV cache and the canary check follow
in the engines' turn.
"""

from typing import Any

from refrain.engines.inference.engine.parking import Memory


class HandedWeights:
    """Weights that were handed to one engine. `llm`: its `AsyncLLM`.

    The first four methods are the calls of vLLM's trainer class (`VLLMWeightSyncClient`).
    """

    def __init__(self, llm: Any, memory: Memory) -> None:
        self._llm = llm
        self._memory = memory
        self._under_way = False
        self._version: int | None = None
        """Policy version that was handed over and not used yet."""

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
        """Return whether the weights of this version are there. True only for the first call.

        End an interrupted hand-over first.
        """
        await self._abandon()
        handed, self._version = self._version, None
        return handed == policy_version

    def forget(self) -> None:
        """Forget the weights. Call when their memory was freed."""
        self._version = None

    async def _abandon(self) -> None:
        if self._under_way:
            await self._llm.collective_rpc("abandon_weight_update")
            self._under_way = False
