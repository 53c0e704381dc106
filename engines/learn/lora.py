"""Low-rank adapters by peft: frozen W, trained A and B, and W + alpha / rank * B A at work.

Source: LoRA (Hu et al. 2021), 4.1. What engines get is the merged weights, so nothing changes for
them.
"""

from collections.abc import Generator
from contextlib import contextmanager
from math import sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import peft
import safetensors.torch
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from schemas.trainer import LoraConfig

ADAPTER = "default"
"""The only adapter, by peft's name for it."""
_PREFIX = "base_model.model."
"""Prefix of a parameter's name in an adapter's file."""


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze the model and put adapters into it. Raises ValueError when no layer has a name of
    `target_modules`."""
    peft.inject_adapter_in_model(_settings(lora), model)


def _settings(lora: LoraConfig) -> peft.LoraConfig:
    names = lora.target_modules
    targets = names if isinstance(names, str) else list(names)
    alpha: Any = lora.alpha  # Typed as a whole number, and divided.
    return peft.LoraConfig("CAUSAL_LM", r=lora.rank, lora_alpha=alpha, target_modules=targets)


@torch.no_grad()
def fill_adapters(model: nn.Module, seed: int) -> None:
    """First values, the same with any number of processes: B is 0, and A as peft draws it."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.zero_()
        elif ".lora_A." in name:
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
            whole = torch.empty(parameter.shape)
            nn.init.kaiming_uniform_(whole, a=sqrt(5), generator=generator)
            whole = whole.to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            parameter.copy_(whole)


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """The model before training, while this lasts."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    # Not by `enable_adapters`, which also has the adapters no longer trained.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Layers with an adapter, by the name of their weight in the model without adapters."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))
    return {f"{name}.weight": layer for name, layer in layers}


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def merged(weight: Tensor, layer: LoraLayer) -> Tensor:
    """A whole weight with the layer's adapter in it. Collective."""
    parts: Any = (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER])
    a, b = (whole(part.weight) for part in parts)
    return weight + (b @ a).to(weight.dtype) * layer.scaling[ADAPTER]


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors of the adapters in host memory, by their names in an adapter's file.
    Collective."""
    return {
        _PREFIX + name.replace(f".{ADAPTER}.", "."): whole(tensor).detach().cpu().contiguous()
        for name, tensor in model.named_parameters()
        if ".lora_" in name
    }


def write_adapter(
    tensors: dict[str, Tensor], lora: LoraConfig, base: Path, directory: Path
) -> None:
    """An adapter as peft reads it, beside its base model."""
    directory.mkdir()
    settings = _settings(lora)
    settings.base_model_name_or_path = str(base)
    settings.inference_mode = True
    settings.save_pretrained(str(directory))
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
