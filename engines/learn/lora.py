"""Low-rank adapters by peft. W is frozen, A and B are trained; W + alpha / rank * B A is computed.

Source: LoRA (Hu et al. 2021), 4.1. Engines get the merged weights, so nothing changes for them.

    nn.Linear, Conv1D     lora.Linear         adapts the layer's weight
    nn.Embedding          lora.Embedding      the same, unless the output layer shares the weight
    experts, routers      lora.ParamWrapper   one for each weight of the module, nested

Wrapping renames the model's own weights. For example, `experts.down_proj` becomes
`experts.base_layer.base_layer.down_proj`. `base_tensors` returns them under their original names.
`add_adapters` refuses a model whose original names or shapes are not restored exactly.
"""

import warnings
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import Any
from zlib import crc32

import peft
import safetensors.torch
import torch
from peft.tuners.lora import Embedding, Linear, LoraLayer, ParamWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from transformers import PreTrainedModel

from refrain.schemas.trainer import LoraConfig

ADAPTER = "default"
"""peft's name for the only adapter."""
_SETTING = "trainer.lora.target_modules"
_PREFIX = "base_model.model."
"""Prefix of each parameter's name in an adapter file."""
_BASE = "base_layer"
"""Attribute with which an adapter module holds the module that it wraps."""
_KINDS = (Linear, Embedding, ParamWrapper)
"""Kinds of adapter that can be merged."""
_FALSE_ALARMS = (
    "The following (rank|alpha)_pattern keys did not match",  # peft checks modules only.
    "fan_in_fan_out is set to False but the target module is `Conv1D`",
    "Model has `tie_word_embeddings=True`",  # `_check_layer` refuses a tied layer.
)
"""Beginnings of peft's warnings that do not apply here."""


def add_adapters(model: PreTrainedModel, lora: LoraConfig) -> None:
    """Freeze the model and add adapters to it. Raise ValueError that names the layer when one of
    `target_modules` does not exist or cannot be merged."""
    due, tied = _shapes(model), _tied_names(model)
    with model.device, warnings.catch_warnings():  # On the meta device if the model is.
        for message in _FALSE_ALARMS:
            warnings.filterwarnings("ignore", message)
        try:
            peft.inject_adapter_in_model(_settings(lora), model)
        except ValueError as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"{_SETTING}: {reason}") from error
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, LoraLayer)]
    for name, layer in layers:
        _check_layer(_weight_name(name, layer), layer, due, tied)
    found = _shapes(model)
    if found != due:
        changed = sorted(due.items() ^ found.items())
        raise ValueError(f"{_SETTING}: adapters change names or shapes of weights: {changed[:4]}")


def _check_layer(
    name: str, layer: LoraLayer, due: Mapping[str, tuple[int, ...]], tied: set[str]
) -> None:
    """Raise ValueError when the adapter cannot be merged into the weight `name`."""
    if type(layer) not in _KINDS:
        raise ValueError(
            f"{_SETTING}: {name} is in a {type(layer).__name__}, and only adapters of linear "
            "layers, embeddings and experts can be merged: leave it out"
        )
    if name in tied:
        raise ValueError(
            f"{_SETTING}: {name} is the embedding and the output layer in one (tied weights), and "
            "an adapter would change one of them alone: leave it out, or train without trainer.lora"
        )
    if name not in due:
        raise ValueError(f"{_SETTING}: the model has no weight {name}: leave its layer out")


def _shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in base_tensors(model).items()}


def _tied_names(model: nn.Module) -> set[str]:
    """Return all names of parameters that have more than one name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name for same in names.values() if len(same) > 1 for name in same}


def base_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers without adapters, by Hugging Face's names.
    Tied weights appear once, under their first name, as in the model's files."""
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return {
        _unwrapped(name): tensor.detach()
        for name, tensor in chain(model.named_parameters(), buffers)
        if ".lora_" not in name
    }


def _unwrapped(name: str) -> str:
    """Return the name that a parameter had before adapters wrapped its modules."""
    return ".".join(part for part in name.split(".") if part != _BASE)


def _settings(lora: LoraConfig) -> peft.LoraConfig:
    names = lora.target_modules
    targets = names if isinstance(names, str) else list(names)
    alpha: Any = lora.alpha  # peft declares an int, but a float works: peft only divides it.
    return peft.LoraConfig("CAUSAL_LM", r=lora.rank, lora_alpha=alpha, target_modules=targets)


@torch.no_grad()
def fill_adapters(model: nn.Module, seed: int) -> None:
    """Initialise the adapters as peft does, so that each product B A is 0. The values do not depend
    on the number of processes."""
    for name, parameter in model.named_parameters():
        if ".lora_B." in name or ".lora_embedding_A." in name:
            parameter.zero_()
        elif ".lora_" in name:
            generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
            whole = torch.empty(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(whole, a=sqrt(5), generator=generator)
            else:
                nn.init.normal_(whole, generator=generator)
            whole = whole.to(parameter.device, parameter.dtype)
            if isinstance(parameter, DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            parameter.copy_(whole)


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Compute with the model before training inside this context."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    # `enable_adapters` would also stop the training of the adapters.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def merged_at_work(model: nn.Module) -> Generator[None]:
    """Compute with merged float32 weights inside this context, as engines do; `ComputeIn` casts
    them. Only one layer's merged weight exists at a time."""
    with ExitStack() as stack:
        stack.enter_context(without_adapters(model))
        for layer in adapted_layers(model).values():
            own: list[Tensor] = []
            stack.enter_context(_hooked(layer, own))
        yield


@contextmanager
def _hooked(layer: Any, own: list[Tensor]) -> Generator[None]:
    """`own` holds the layer's weight while the merged weight replaces it."""

    def put(*_: Any) -> None:
        weight = _weight(layer)
        own.append(weight.data)
        weight.data = merged(weight.data, layer)

    def take_back(*_: Any) -> None:
        _weight(layer).data = own.pop()

    handles = (
        layer.register_forward_pre_hook(put),
        layer.register_forward_hook(take_back, always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _weight(layer: Any) -> nn.Parameter:
    """Return the weight that an adapter changes."""
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Return the adapters by the name of their weight in the model without adapters."""
    layers = ((name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer))
    return {_weight_name(name, layer): layer for name, layer in layers}


def _weight_name(name: str, layer: LoraLayer) -> str:
    own = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    return f"{_unwrapped(name)}.{own}"


def whole(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be sharded. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Update(nn.Module):
    """The product of an adapter as peft computes it; a module, so that `functional_call` can pass
    whole parameters."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        return self.layer.get_delta_weight(ADAPTER)


@torch.no_grad()
def merged(weight: Tensor, layer: LoraLayer) -> Tensor:
    """Return a whole weight with the layer's adapter added in float32. Collective."""
    module: Any = layer
    parts = {
        f"layer.{name}": whole(part.data).float()
        for name, part in module.named_parameters()
        if name.startswith("lora_")
    }
    update = functional_call(_Update(layer), parts, ())
    assert update.shape == weight.shape, f"{update.shape} for {weight.shape}"
    return update + weight


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' whole tensors in host memory, by their names in an adapter file.
    Collective."""
    return {
        _name_in_file(name): whole(tensor).detach().cpu().contiguous()
        for name, tensor in model.named_parameters()
        if ".lora_" in name
    }


def _name_in_file(name: str) -> str:
    return _PREFIX + name.removesuffix(f".{ADAPTER}").replace(f".{ADAPTER}.", ".")


def write_adapter(
    tensors: dict[str, Tensor], lora: LoraConfig, base: Path, directory: Path
) -> None:
    """Write an adapter as peft reads it, with a reference to its base model."""
    directory.mkdir()
    settings = _settings(lora)
    settings.base_model_name_or_path = str(base)
    settings.inference_mode = True
    settings.save_pretrained(str(directory))
    safetensors.torch.save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
