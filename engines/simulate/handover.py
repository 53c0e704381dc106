"""Estimate the seconds of training, and of a hand-over between generating and training. Pure.

    train          6 P tokens / (g F MFU)               or measured GPU-seconds per token
    weights out    W / link (if g > 1) + W / host       rank 0 gathers into host memory
    weights in     W / t / host                         all engines at the same time
    sleep, wake    SLEEP_S, WAKE_S                      engines free memory, and allocate it again
    leave, enter   S / g / host                         if engine and state do not fit together

    P       active parameters per token              g      GPUs of the trainer
    W       bytes of the engines' weights            t      TP degree
    S       bytes of the trainer's resting state     F      peak FLOPs per second of a GPU
    link    bandwidth between GPUs                   host   bandwidth between GPU and host memory

Bandwidths are those that transfers reach (`engines.latency.hardware`).

Deviations: training scales linearly with its GPUs. Attention and the optimiser's update are left
out. They are small beside 6 P for responses of less than about 10K tokens. The reward stage costs
nothing, because it runs during the rollouts.
"""

from dataclasses import dataclass

from refrain.engines.latency.hardware import Hardware
from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.machine.trainer_memory import Training, resting_bytes

MFU = 0.35
"""Assumed model FLOPs utilisation in training, at 6 P FLOPs per token. Layers that gradient
checkpointing computes again count once."""
SLEEP_S = 0.5
"""Assumed time in which an engine frees its memory."""
WAKE_S = 1.0
"""Assumed time in which an engine allocates its memory again and checks its weights."""


@dataclass(frozen=True, slots=True)
class Handover:
    """Seconds of the parts of a hand-over."""

    weights_out_s: float = 0.0
    weights_in_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0
    leave_s: float = 0.0
    enter_s: float = 0.0


def gpu_seconds_of_token(shape: ModelShape, hardware: Hardware) -> float:
    """Return the seconds that one GPU needs to train on a token, by the formula."""
    flops = 6.0 * (shape.active_layer_params + shape.head_params)
    return flops / (hardware.flops_per_s * MFU)


def estimate_handover(
    shape: ModelShape,
    hardware: Hardware,
    training: Training,
    tp_degree: int,
    *,
    shared: bool,
    state_leaves: bool,
) -> Handover:
    """Estimate the hand-over between engines and a trainer.

    `shared`: engines and trainer take turns on the same GPUs. `state_leaves`: the trainer's state
    moves to host memory while engines generate.
    """
    weights, host = shape.weight_bytes, hardware.host_bytes_per_s
    link = hardware.link_bytes_per_s * hardware.link_share
    gather_s = weights / link if training.num_ranks > 1 else 0.0
    copy_s = resting_bytes(shape, training) / host if shared and state_leaves else 0.0
    return Handover(
        weights_out_s=gather_s + weights / host,
        weights_in_s=weights / tp_degree / host,
        sleep_s=SLEEP_S if shared else 0.0,
        wake_s=WAKE_S if shared else 0.0,
        leave_s=copy_s,
        enter_s=copy_s,
    )
