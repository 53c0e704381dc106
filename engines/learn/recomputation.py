"""Choose the layers whose activations the backward pass computes again."""

import torch
import torch.distributed as dist

from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.machine.plan import kept_layers
from refrain.engines.user_files import read_json_object
from refrain.schemas.config import TrainConfig


def num_kept_layers(config: TrainConfig, device: torch.device) -> int:
    """Return how many layers keep their activations on every rank, besides those that
    `gradient_checkpointing: false` keeps.

    0 unless it is `auto` and this is a GPU whose memory can be planned. Collective: all ranks take
    the least number, because FSDP2 gathers a layer when it is computed again.
    """
    if config.trainer.gradient_checkpointing != "auto" or device.type != "cuda":
        return 0
    num = _planned(config, torch.cuda.mem_get_info(device)[1])
    if not dist.is_initialized():
        return num
    least = torch.tensor(num, device=device)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least.item())


def _planned(config: TrainConfig, gpu_bytes: float) -> int:
    values = read_json_object(config.model.path / "config.json")
    try:
        shape = ModelShape.from_hf_config(values.get("text_config", values))
    except ValueError:  # The check before the run has reported that memory is not planned.
        return 0
    return kept_layers(config, shape, gpu_bytes)
