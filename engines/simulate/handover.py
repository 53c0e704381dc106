"""Time that training takes, and what it costs to go from generating to training and back. Pure.

P: parameters that a token is multiplied with; W: bytes of the weights that engines take; S: bytes
of the trainer's state between steps; g: GPUs of the trainer; t: TP degree.

    train          6 P tokens / (g F MFU)               or as measured: GPU-seconds of a token
    weights out    W / link (g > 1) + W / host          gathered by rank 0, into host memory
    weights in     W / t / host                         each engine, all at once
    sleep, wake    SLEEP_S, WAKE_S                      memory is given back, and taken again
    leave, enter   S / g / host                         where engine and state do not fit together

F: the GPU's peak; link, host: what is reached between GPUs, and between a GPU and host memory
(`engines.latency.hardware`).

Deviations: training scales with its GPUs, and attention among its tokens is left out, as is the
optimiser's update; both are small beside 6 P for responses that are shorter than some 10K tokens.
Reward is hidden behind the rollouts.
"""

from dataclasses import dataclass

from engines.latency.hardware import Hardware
from engines.latency.model_shape import ModelShape
from engines.learn.footprint import Training, resting_bytes

MFU = 0.35
"""Assumed share of its peak FLOPs that a GPU reaches in training, of 6 P FLOPs a token: layers that
are computed again in the backward pass count once."""
SLEEP_S = 0.5
"""Assumed for an engine that gives its memory back."""
WAKE_S = 1.0
"""Assumed for an engine that takes it again, and asks whether it does as before."""


@dataclass(frozen=True, slots=True)
class Handover:
    """Seconds of one hand-over, by its parts."""

    weights_out_s: float = 0.0
    weights_in_s: float = 0.0
    sleep_s: float = 0.0
    wake_s: float = 0.0
    leave_s: float = 0.0
    enter_s: float = 0.0


def gpu_seconds_of_token(shape: ModelShape, hardware: Hardware) -> float:
    """Seconds that one GPU needs to train a token, by the formula."""
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
    """Hand-over between engines and a trainer of so many ranks. `shared`: they have the same GPUs;
    `state_leaves`: the trainer's state goes to host memory."""
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
