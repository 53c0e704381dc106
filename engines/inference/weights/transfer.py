"""Load weights into a worker through vLLM's weight-transfer interface.

They come from a safetensors file in shared memory, or through vLLM's `ipc` backend from a trainer
on the same GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCWeightTransferEngine,
    IPCWeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

NOTHING_LOADED = "%s: Failed to load weights"
"""vLLM's warning at each update about each layer without own weights in the file, such as a tied
head."""
# Hide the warning. If a layer kept older weights, `stale_layers` names it and the run stops.
layerwise.logger.addFilter(lambda record: record.msg != NOTHING_LOADED)


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str
    """A safetensors file on this node with the Hugging Face parameter names."""


class PolicyWeightTransfer(IPCWeightTransferEngine):
    """Weight transfer of one worker, which takes its own shard of every parameter.

    It maps a file, without coordination with the trainer, or opens tensors by CUDA IPC handles.
    """

    stale_layers: frozenset[str] = frozenset()
    """Layers that took no weights in the last update but did in an earlier one."""
    _ever_taken: frozenset[str] = frozenset()

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        if "path" in update_dict:
            return FileUpdateInfo(**update_dict)
        return super().parse_update_info(update_dict)

    def receive_weights(self, update_info: FileUpdateInfo | IPCWeightTransferUpdateInfo) -> None:
        if isinstance(update_info, FileUpdateInfo):
            self._load(update_info.path)
        else:
            super().receive_weights(update_info)

    def _load(self, path: str) -> None:
        with safe_open(path, framework="pt") as tensors:
            model: Any = self.model
            names = tensors.keys()  # `tensors` is no mapping and cannot be iterated.
            model.load_weights((name, tensors.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        taken = frozenset(
            name for name, layer in self.model.named_modules() if _took_weights(layer)
        )
        self._ever_taken |= taken
        self.stale_layers = self._ever_taken - taken
        super().finish_weight_update()
        if current_platform.is_cpu():
            self._pack_again()
        else:
            # Free temporary copies before the KV cache is allocated.
            torch.accelerator.empty_cache()

    def _pack_again(self) -> None:
        """Pack the weights of tied heads and experts again: the CPU build needs packed weights.

        A tied head loads no weights itself, so the reload leaves its packed copy at the old ones.
        vLLM packs experts only once, so the reload leaves the new ones unpacked.
        """
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            elif isinstance(module, RoutedExperts):
                kernel: Any = module.quant_method.moe_kernel
                kernel.fused_experts.process_weights_after_loading(module)


def _took_weights(layer: torch.nn.Module) -> bool:
    """Return whether this layer's own tensors got any weights in the current update."""
    info = get_layerwise_info(layer)
    return not info.can_load() or info.load_numel > 0
