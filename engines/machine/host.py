"""Is there room for a run whose engines and trainer are processes of a CPU host? Pure."""

from dataclasses import dataclass

from engines.pat.memory import CPU_PROCESS_BYTES, USABLE_SHARE, Footprint

TRAINED_BYTES = 16
"""Bytes of a parameter while it is trained: itself, its gradient and AdamW's two moments, float32.
Ranks share them."""


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Bytes of a host that a run takes."""

    num_engine_processes: int
    engines: Footprint
    num_trainers: int
    num_params: int
    """Parameters that are trained."""

    @property
    def trainer_bytes(self) -> float:
        if not self.num_trainers:
            return 0.0
        return TRAINED_BYTES * self.num_params + CPU_PROCESS_BYTES * self.num_trainers

    @property
    def bytes(self) -> float:
        return self.engines.bytes + self.trainer_bytes

    def __str__(self) -> str:
        text = (
            f"{self.engines.bytes / 1e9:.1f} GB for {self.num_engine_processes} engine processes: "
            f"{self.engines}"
        )
        if self.num_trainers:
            text += f"; {self.trainer_bytes / 1e9:.1f} GB for the trainer"
        return text


def require_room(need: HostNeed, host_bytes: float) -> None:
    """Raises ValueError when the host has less memory than is needed, however free it is."""
    usable = host_bytes * USABLE_SHARE
    if need.bytes > usable:
        raise ValueError(
            f"engines and trainer on CPUs need {need.bytes / 1e9:.1f} GB of memory ({need}), and "
            f"{usable / 1e9:.1f} GB of this machine can be used: lower rollout.num_engines, "
            "rollout.tp_degree, rollout.kv_cache_bytes or trainer.num_processes, or take a smaller "
            "model"
        )
