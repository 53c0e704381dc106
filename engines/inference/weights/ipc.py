"""vLLM's trainer class of its `ipc` backend, fed with a policy's tensors."""

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
    from engines.learn.published import WholeTensors


class OnePass(WeightSource):
    """Tensors that are gathered once, each in the engines' data type."""

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
    """Send all of them to the client's engines. Every rank of the trainer calls it, on its own GPU.
    `buffer_bytes`: of the GPU, at least those of the largest tensor."""
    how = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=buffer_bytes, rank=rank)
    trainer = IPCTrainerWeightTransferEngine.trainer_init(how, client=client, source=OnePass(whole))
    trainer.send_weights()
    trainer.shutdown()
