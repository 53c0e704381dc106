"""Load the policy from a Hugging Face directory: whole in one process, or one shard on each rank.

With a mesh, no rank ever holds the whole model. The model is created without memory and sharded,
and each rank reads its slices of the files. Sometimes the model's parameters differ from those in
the files: for example, transformers merges the experts of a mixture. Then rank 0 reads the files
and sends the other ranks their shards.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from refrain.engines.learn.attention import PACKED
from refrain.engines.learn.finite import is_finite, not_finite
from refrain.engines.learn.lora import add_adapters, base_tensors, fill_adapters
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.rope import fix_ropes
from refrain.engines.learn.routing_replay import RoutingReplay
from refrain.engines.learn.sharding import shard
from refrain.schemas.trainer import LoraConfig


@dataclass(frozen=True, slots=True)
class Loading:
    """Settings with which a policy is loaded and computed."""

    device: torch.device
    mesh: DeviceMesh | None = None
    """Ranks over which FSDP2 shards the policy. Two dimensions (replicas, shards) mean HSDP."""
    gradient_checkpointing: bool = False
    kept_layers: int = 0
    """Last layers that keep their activations even with `gradient_checkpointing`: the backward pass
    frees those first."""
    dtype: torch.dtype = torch.float32
    """Data type of the master weights."""
    compute_dtype: torch.dtype = torch.float32
    """Data type in which a sharded policy computes. A layer has its copy only while it computes.
    Gradients are accumulated in float32."""
    lora: LoraConfig | None = None
    seed: int = 0
    """Seed of the adapters' initial values."""
    trust_remote_code: bool = False
    """Whether to run code that comes with the model."""
    replays_routing: bool = False
    """Whether the policy takes the experts of its tokens from the rollout."""
    max_tokens: int | None = None
    """The engines' `max_model_len`, by which they choose a rope's factors; None: the model's own
    limit."""


def load_policy(model_dir: Path, loading: Loading) -> PolicyModel:
    """Load a policy with the weights of a Hugging Face directory.

    Raises ValueError when transformers cannot load the directory, or when weights are missing or
    not finite.
    """
    with _told_of(model_dir):
        config = AutoConfig.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=loading.trust_remote_code
        )
        if loading.mesh is None:
            policy = prepared(_read_whole(model_dir, config, loading), loading)
            policy.to(loading.device)
        else:
            policy = _load_sharded(model_dir, config, loading, loading.mesh)
    _refuse_not_finite(model_dir, policy, loading.mesh)
    if loading.lora:
        fill_adapters(policy.model, loading.seed)
    return policy


@contextmanager
def _told_of(model_dir: Path) -> Generator[None]:
    try:
        yield
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"cannot load the model in {model_dir}: {error}") from error


def prepared(model: PreTrainedModel, loading: Loading) -> PolicyModel:
    """Return the model ready for training, in eval mode. Engines use no dropout and no router
    noise, and the ratio between trainer and engines must start at 1."""
    if not model._can_set_attn_implementation():
        # The model has its own attention, which needs a mask as a tensor.
        model.config._attn_implementation = "eager"
    fix_ropes(model, loading.max_tokens)
    if loading.lora:
        add_adapters(model, loading.lora)
    policy = PolicyModel(model).eval()
    if loading.replays_routing:
        policy.replay = RoutingReplay(model)
    if loading.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        kept = policy.layers[max(0, len(policy.layers) - loading.kept_layers) :]
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer) and module in kept:
                module.gradient_checkpointing = False
            elif isinstance(module, GradientCheckpointingLayer):
                _checkpoint_in_eval_mode(module)
    return policy


def _checkpoint_in_eval_mode(layer: GradientCheckpointingLayer) -> None:
    """Make transformers see training mode when it calls the layer, and the layer itself see eval
    mode."""

    def is_called(*_: Any) -> None:
        layer.training = False

    def has_returned(*_: Any) -> None:
        layer.training = True

    layer.training = True
    layer.register_forward_pre_hook(is_called)
    layer.register_forward_hook(has_returned, always_call=True)


def _refuse_not_finite(model_dir: Path, policy: PolicyModel, mesh: DeviceMesh | None) -> None:
    """Raise on every rank when any rank finds NaN or infinity, so that no rank waits for the
    others."""
    found = ""
    for name, tensor in base_tensors(policy.model).items():
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if not is_finite(own):
            found = name
            break
    bad = torch.tensor(float(bool(found)), device=policy.device)
    if mesh is not None:
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    if bad.item():
        raise ValueError(not_finite(model_dir, found or "a weight of another rank"))


def attention_of(config: PretrainedConfig) -> str:
    """Return the attention to build a model with: the trainer's, or the model's own if it must."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return PACKED  # The model has its own code. `prepared` checks the result.
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return PACKED if made._can_set_attn_implementation() else "eager"


def _read_whole(model_dir: Path, config: PretrainedConfig, loading: Loading) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=loading.dtype,
        attn_implementation=attention_of(config),
        local_files_only=True,
        trust_remote_code=loading.trust_remote_code,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = loaded
    _refuse_missing(model_dir, report["missing_keys"])
    return model


def _refuse_missing(model_dir: Path, names: set[str]) -> None:
    if names:
        raise ValueError(
            f"{model_dir} lacks weights: {sorted(names)[:5]} ...; its config.json does not belong "
            "to its weights"
        )


def _load_sharded(
    model_dir: Path, config: PretrainedConfig, loading: Loading, mesh: DeviceMesh
) -> PolicyModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=loading.dtype,
            attn_implementation=attention_of(config),
            trust_remote_code=loading.trust_remote_code,
        )
    policy = prepared(model, loading)
    shard(policy, mesh, loading.compute_dtype)
    give_memory(policy, loading.device)
    wanted = base_tensors(policy.model)
    reader = HuggingFaceStorageReader(str(model_dir))
    there: dict[str, Any] = reader.read_metadata().state_dict_metadata
    if all(name in there and there[name].size == wanted[name].size() for name in wanted):
        dcp.load(dict(wanted), storage_reader=reader, no_dist=True)
    else:
        _fill_from_first(policy, model_dir, config, loading, wanted)
    return policy


def give_memory(policy: PolicyModel, device: torch.device) -> None:
    """Allocate the parameters on the device, and keep tied ones tied. Compute the buffers that no
    file contains."""
    first_name: dict[int, str] = {}
    tied = {
        name: first
        for name, parameter in policy.named_parameters(remove_duplicate=False)
        if (first := first_name.setdefault(id(parameter), name)) != name
    }
    policy.to_empty(device=device)
    for name, first in tied.items():
        module, _, attribute = name.rpartition(".")
        setattr(policy.get_submodule(module), attribute, policy.get_parameter(first))
    saved = policy.state_dict()
    for name, buffer in policy.named_buffers():
        if name not in saved and buffer.is_floating_point():
            buffer.fill_(torch.nan)  # Fresh memory may contain an earlier model's values.
    for name in saved:
        at, _, attribute = name.rpartition(".")
        # transformers marks loaded tensors like this, and does not initialise them again.
        getattr(policy.get_submodule(at), attribute)._is_hf_initialized = True
    policy.model.initialize_weights()


@torch.no_grad()
def _fill_from_first(
    policy: PolicyModel,
    model_dir: Path,
    config: PretrainedConfig,
    loading: Loading,
    wanted: dict[str, Tensor],
) -> None:
    first = dist.get_rank() == 0
    read = dict(_read_whole(model_dir, config, loading).state_dict()) if first else {}
    for name, tensor in wanted.items():
        whole = read[name] if first else torch.empty(tensor.shape, dtype=tensor.dtype)
        whole = whole.to(policy.device)
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, tensor.placements)
        else:
            dist.broadcast(whole, 0)
        tensor.copy_(whole)
