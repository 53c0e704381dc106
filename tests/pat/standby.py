"""Compares the cost of standby engines with resharding in place, on the machines of PAT."""

from collections.abc import Sequence
from dataclasses import dataclass

from refrain.engines.latency.hardware import Hardware
from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.pat.memory import PARKED_BYTES


@dataclass(frozen=True, slots=True)
class StandbyCost:
    """Cost of one more layout, with standby engines and with resharding."""

    model: str
    hardware: str
    from_tp: int
    to_tp: int
    resident_bytes: float
    """Per GPU, weights and process of a standby engine that keeps its weights. It loads none."""
    resident_share: float
    """Share of the GPU's memory."""
    reloaded_bytes: float
    """Per GPU, the process of a standby engine without weights."""
    reload_s: float
    """To load its weights from host memory at every switch."""
    reshard_s: float
    """To all-gather all weights among the target's GPUs at every switch. This needs no standby
    memory."""


def compare_standby(
    shape: ModelShape,
    hardware: Hardware,
    tp_degrees: Sequence[int],
    host_bytes_per_s: float = 12e9,
) -> list[StandbyCost]:
    """Return the cost of each higher TP degree. `host_bytes_per_s`: from host memory to one GPU."""
    link = hardware.link_bytes_per_s * hardware.link_share
    return [
        StandbyCost(
            model=shape.name,
            hardware=hardware.name,
            from_tp=tp_degrees[0],
            to_tp=to_tp,
            resident_bytes=shape.weight_bytes / to_tp + PARKED_BYTES,
            resident_share=(shape.weight_bytes / to_tp + PARKED_BYTES) / hardware.memory_bytes,
            reloaded_bytes=PARKED_BYTES,
            reload_s=shape.weight_bytes / to_tp / host_bytes_per_s,
            reshard_s=shape.weight_bytes * (1 - 1 / to_tp) / link,
        )
        for to_tp in tp_degrees[1:]
    ]
