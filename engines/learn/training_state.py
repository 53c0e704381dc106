"""The part of a checkpoint that only training needs, and the export of the model.

Optimiser state is stored whole, by parameter name, so a run may go on with another number of
trainer processes. Everything here that takes a policy or an optimiser is collective under FSDP2:
every process calls it, and rank 0 gets the content.
"""

import pickle
import random
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy._core import multiarray
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from engines.learn.policy import PolicyModel

_NUMPYS: list[Any] = [
    multiarray._reconstruct,
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
]
"""Types in the state of NumPy's generator, beside plain numbers and tensors."""
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")


def capture(policy: PolicyModel, optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Optimiser, scheduler and the generators of every rank, in host memory."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return {
        "optimizer": get_optimizer_state_dict(policy, optimizer, options=options),
        "scheduler": scheduler.state_dict(),
        "rng_by_rank": _gather(_rng_state()),
    }


def read(file: Path) -> dict[str, Any]:
    """Read the file of what `capture` gave.

    Raises ValueError, and runs nothing, where something else is in the file: it may come from an
    object store that others write to.
    """
    try:
        with torch.serialization.safe_globals(_NUMPYS):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is not what refrain writes: it is damaged, or asks for code to be run; see "
            "where it comes from, and remove this checkpoint to use an earlier one"
        ) from error


def apply(
    state: dict[str, Any],
    policy: PolicyModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    *,
    rank: int,
    world_size: int,
) -> None:
    """Continue where `capture` left off.

    With another number of processes than before, the generators keep their fresh seeds.
    """
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(policy, optimizer, state["optimizer"], options=options)
    scheduler.load_state_dict(state["scheduler"])
    if len(state["rng_by_rank"]) == world_size:
        _set_rng_state(state["rng_by_rank"][rank])


def seed_everything(seed: int, rank: int) -> None:
    """Seed every generator of this process."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def num_bytes(content: Any) -> int:
    """Bytes of all tensors and arrays in a checkpoint's content; the rest is small."""
    if isinstance(content, Tensor | np.ndarray):
        return content.nbytes
    if isinstance(content, dict):
        return sum(map(num_bytes, content.values()))
    return sum(map(num_bytes, content)) if isinstance(content, list | tuple) else 0


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _gather(value: object) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def host_tensors(policy: PolicyModel, dtype: torch.dtype, *, keep: bool) -> dict[str, Tensor]:
    """Whole parameters and persistent buffers in host memory as `dtype`, none where not `keep`.
    Names are Hugging Face's; tied weights come once, under their first name, as in its files."""
    model, tensors = policy.model, {}
    saved = model.state_dict().keys()
    buffers = ((name, tensor) for name, tensor in model.named_buffers() if name in saved)
    for name, tensor in chain(model.named_parameters(), buffers):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            tensors[name] = whole.detach().to(device="cpu", dtype=dtype).contiguous()
    return tensors


def write_export(
    policy: PolicyModel, tensors: dict[str, Tensor], source_dir: Path, target_dir: Path
) -> None:
    """A Hugging Face model directory. Tokenizer files are copied as they are in `source_dir`."""
    policy.model.save_pretrained(target_dir, state_dict=tensors)
    for file in source_dir.iterdir():
        wanted = file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES)
        if wanted and not (target_dir / file.name).exists():
            shutil.copyfile(file, target_dir / file.name)
