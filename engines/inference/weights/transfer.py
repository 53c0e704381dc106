"""Weights into a worker, through vLLM's weight-transfer interface: from a safetensors file in
shared memory, or as vLLM's own `ipc` backend takes them from a trainer on the same GPU."""

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
"""Warning of vLLM at each update, about every layer that has no weights of its own in the file,
such as a tied head."""
# A layer that did keep older weights is in `stale_layers`, by name, and stops the run.
layerwise.logger.addFilter(lambda record: record.msg != NOTHING_LOADED)


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """Place of the weights."""

    path: str
    """A safetensors file on this node with the Hugging Face parameter names."""


class PolicyWeightTransfer(IPCWeightTransferEngine):
    """Each worker takes its own shard of every parameter: of a file that it maps, which needs no
    agreement with the trainer, or of tensors whose CUDA IPC handles come."""

    stale_layers: frozenset[str] = frozenset()
    """Layers that took no weights in the last update, and took some in one before."""
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
            names = tensors.keys()  # not a mapping: it cannot be iterated itself
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
            # What it copied is freed before the KV cache takes its memory.
            torch.accelerator.empty_cache()

    def _pack_again(self) -> None:
        """The CPU build multiplies by packed weights. A tied head loads nothing itself, so the
        reload leaves its packed copy at the old weights, and experts are packed once only: the
        reload leaves them as they come."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
            elif isinstance(module, RoutedExperts):
                kernel: Any = module.quant_method.moe_kernel
                kernel.fused_experts.process_weights_after_loading(module)


def _took_weights(layer: torch.nn.Module) -> bool:
    """Return whether any weights came for this layer's own tensors in the update under way."""
    info = get_layerwise_info(layer)
    return not info.can_load() or info.load_numel > 0
