"""FSDP2: which parts of a policy are whole at a time, and when."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from engines.learn.policy import PolicyModel


def shard(policy: PolicyModel, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Make each decoder layer, and the rest, an FSDP2 unit over `mesh`."""
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # Activations follow the parameters' data type, also where `ComputeIn` sets another.
        cast_forward_inputs=False,
    )
    for module in policy.modules():
        if type(module).__name__ in (policy.model._no_split_modules or ()):
            fully_shard(module, mesh=mesh, mp_policy=precision)
    # Resharded even as the root: after a forward pass without a backward pass, as for canaries, the
    # parameters would otherwise no longer be those that the optimiser knows.
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=True)


def keep_gathered(policy: PolicyModel, keep: bool) -> None:
    """Whether a sharded policy's layers stay whole after a forward and a backward pass."""
    if isinstance(policy, FSDPModule):
        policy.set_reshard_after_forward(not keep)
        policy.set_reshard_after_backward(not keep)
