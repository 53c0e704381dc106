"""Send a policy's tensors with the trainer class of vLLM's `ipc` backend."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
)

if TYPE_CHECKING:
    from refrain.engines.learn.publishing import WholeTensors


class OnePass(WeightSource):
    """Weight source that gathers each tensor once and casts it to the engines' data type."""

    def __init__(self, whole: "WholeTensors") -> None:
        self._whole = whole

    def metadata(self) -> list[ParamMeta]:
        dtype = self._whole.dtype
        return [ParamMeta(name, dtype, tuple(of)) for name, of in self._whole.shapes.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.to(self._whole.dtype)) for name, tensor in self._whole.tensors)


@torch.no_grad()
def send_weights(
    client: VLLMWeightSyncClient, rank: int, whole: "WholeTensors", buffer_bytes: int
) -> None:
    """Send all tensors to the client's engines. Every rank of the trainer calls this on its GPU.

    `buffer_bytes`: size of the buffer on the GPU, at least that of the largest tensor.
    """
    how = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=buffer_bytes, rank=rank)
    trainer = IPCTrainerWeightTransferEngine.trainer_init(how, client=client, source=OnePass(whole))
    trainer.send_weights()
    trainer.shutdown()
