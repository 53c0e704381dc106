"""The parts of a checkpoint: each rank's training state, and an export.

```
training/              trained weights and AdamW's moments: torch.distributed.checkpoint,
                       a safetensors file a rank, readable by any number of ranks
training_state.pt      learning rate, number of updates, random number generators
model/                 Hugging Face directory in the engines' data type (`engines.learn.export`)
adapter/               with LoRA: the adapter alone, in peft's format
```

Under FSDP2, all functions that take a policy or an optimiser are collective: every process calls
them, and rank 0 gets the whole tensors.
"""

import pickle
import random
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy._core import multiarray
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from refrain.engines.checksums import sha256_of_all
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.publishing import whole_tensors

_NUMPYS: list[Any] = [
    multiarray._reconstruct,
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
]
"""Types in the state of NumPy's generator, besides plain numbers and tensors."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def capture(optimizer: Optimizer, scheduler: LRScheduler) -> dict[str, Any]:
    """Return the small parts: scheduler, number of updates and the generators of every rank."""
    updates = [int(state["step"]) for state in optimizer.state.values()]
    return {
        "num_updates": max(updates, default=0),
        "scheduler": scheduler.state_dict(),
        "rng_by_rank": _gather(_rng_state()),
    }


def read(file: Path) -> dict[str, Any]:
    """Read a file that contains the result of `capture`.

    Raises ValueError for any other content, and never runs code from the file. The file may come
    from an object store that others can write to.
    """
    try:
        with torch.serialization.safe_globals(_NUMPYS):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file} is not what refrain writes: it is damaged, or tries to run code. Check "
            "where it comes from, and remove this checkpoint to use an earlier one"
        ) from error


def apply(
    state: dict[str, Any],
    shards: Path,
    policy: PolicyModel,
    optimizer: Optimizer,
    scheduler: LRScheduler,
    *,
    rank: int,
    world_size: int,
) -> None:
    """Restore the state that `capture` and `write_shards` saved.

    If the number of processes has changed, the generators keep their fresh seeds. Raises ValueError
    when the shards are damaged or belong to another model.
    """
    for parameter in policy.parameters():
        if parameter.requires_grad:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(state["num_updates"]), device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }
    read_shards(shards, trained_tensors(policy, optimizer))
    scheduler.load_state_dict(state["scheduler"])
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate
    if len(state["rng_by_rank"]) == world_size:
        _set_rng_state(state["rng_by_rank"][rank])


def moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield AdamW's moments, without a copy."""
    return (state[name] for state in optimizer.state.values() for name in MOMENTS)


def trained_tensors(policy: PolicyModel, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the trained weights and their moments by name, without a copy."""
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            tensors[f"model.{name}"] = parameter.detach()
            state = optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                kept = state.get(moment)
                tensors[f"{moment}.{name}"] = torch.zeros_like(parameter) if kept is None else kept
    return tensors


def write_shards(directory: Path, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Write this rank's share of the tensors. No copy is made, so they must not change meanwhile.
    Return the SHA-256 of every rank's file, by name; each rank hashes its own file."""
    together = dist.is_initialized() and dist.get_world_size() > 1
    if together:
        dist.barrier()  # Rank 0 has created the directory before it gets here.
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        with _alone_without_a_word():
            dcp.save(tensors, storage_writer=writer, no_dist=not together)
    except dcp.CheckpointException as error:
        raise next(failure for failure, _ in error.failures.values()) from error
    # The writer names the files like this.
    own = directory.glob(f"shard-{dist.get_rank() + 1 if together else 1:05d}-*")
    checksums = {file.name: sha256 for file, sha256 in sha256_of_all(own).items()}
    return {name: sha256 for one in _gather(checksums) for name, sha256 in one.items()}


def read_shards(directory: Path, tensors: dict[str, Tensor]) -> None:
    """Read this rank's share into the tensors. Any number of ranks may have written them. Raise
    ValueError when the files are damaged or contain other tensors."""
    try:
        reader = HuggingFaceStorageReader(str(directory))
        with _alone_without_a_word():
            dcp.load(tensors, storage_reader=reader, no_dist=True)
    except (dcp.CheckpointException, RuntimeError, OSError, SafetensorError, KeyError) as error:
        raise ValueError(
            f"{directory} cannot be read: {error}; use an earlier checkpoint, or set model.path "
            "to this one's model/ and start anew"
        ) from error


@contextmanager
def _alone_without_a_word() -> Generator[None]:
    """Hide torch's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def seed_everything(seed: int, rank: int) -> None:
    """Seed every random number generator of this process."""
    random.seed(seed + rank)
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def num_bytes(tensors: dict[str, Tensor]) -> int:
    """Return the bytes of all tensors; a sharded tensor counts as a whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


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
    """Return all `whole_tensors` in host memory as `dtype`, or an empty dict without `keep`."""
    tensors = {}
    for name, tensor in whole_tensors(policy.model, dtype).tensors:
        if keep:
            tensors[name] = tensor.to(device="cpu", dtype=dtype).contiguous()
    return tensors
