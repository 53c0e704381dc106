"""Check that a run on CPUs, with its engines and trainer, fits in the host's memory. Pure."""

from dataclasses import dataclass

from refrain.engines.pat.memory import CPU_PROCESS_BYTES, USABLE_SHARE, Footprint

TRAINED_BYTES = 16
"""Bytes per trained parameter: the parameter, its gradient and AdamW's two moments in float32. The
ranks divide them among themselves."""


@dataclass(frozen=True, slots=True)
class HostNeed:
    """Host memory that a run on CPUs needs."""

    num_engine_processes: int
    engines: Footprint
    num_trainers: int
    num_params: int
    """Number of trained parameters."""

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
    """Raise ValueError when the run needs more than the usable part of the host's total memory."""
    usable = host_bytes * USABLE_SHARE
    if need.bytes > usable:
        raise ValueError(
            f"engines and trainer on CPUs need {need.bytes / 1e9:.1f} GB of memory ({need}), but "
            f"only {usable / 1e9:.1f} GB of this machine can be used. Lower rollout.num_engines, "
            "rollout.tp_degree, rollout.kv_cache_bytes or trainer.num_processes, or take a smaller "
            "model"
        )
