"""FSDP2: how a policy is sharded, and when its layers are gathered."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from refrain.engines.learn.policy import PolicyModel


def shard(policy: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Make each decoder layer an FSDP2 unit over `mesh`, and the rest another one."""
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # Activations have the parameters' data type, even when `ComputeIn` changes it.
        cast_forward_inputs=False,
    )
    for layer in policy.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    # Reshard the root too. Otherwise, after a forward pass without a backward pass (as for
    # canaries), its parameters would no longer be the ones that the optimiser knows.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    register_fsdp_forward_method(policy, "hidden_states")


def make_mesh(device: torch.device, world_size: int, num_replicas: int) -> DeviceMesh | None:
    """Return the mesh of all ranks: shards, or replicas of shards (HSDP). A single GPU gets a mesh
    of one, for mixed precision; a single process on a CPU gets none."""
    if world_size == 1:
        if device.type == "cpu":
            return None
        if not dist.is_initialized():
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    if num_replicas == 1:
        return init_device_mesh(device.type, (world_size,))
    shape = (num_replicas, world_size // num_replicas)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard"))
