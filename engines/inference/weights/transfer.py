"""Weights from a safetensors file in shared memory, through vLLM's weight-transfer interface."""

from dataclasses import dataclass
from typing import Any

from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform


@dataclass
class HostMemoryInitInfo(WeightTransferInitInfo):
    """Initial agreement between trainer and worker: there is nothing to agree on."""


@dataclass
class HostMemoryUpdateInfo(WeightTransferUpdateInfo):
    """Place of the weights."""

    path: str
    """A safetensors file on this node with the Hugging Face parameter names."""


class HostMemoryWeightTransfer(WeightTransferEngine[HostMemoryInitInfo, HostMemoryUpdateInfo]):
    """Each worker maps the file and takes its own shard of every parameter."""

    init_info_cls = HostMemoryInitInfo
    update_info_cls = HostMemoryUpdateInfo

    def init_transfer_engine(self, init_info: HostMemoryInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: HostMemoryUpdateInfo) -> None:
        with safe_open(update_info.path, framework="pt") as tensors:
            model: Any = self.model
            names = tensors.keys()  # not a mapping: it cannot be iterated itself
            model.load_weights((name, tensors.get_tensor(name)) for name in names)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            self._pack_again()

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

    def shutdown(self) -> None:
        pass
