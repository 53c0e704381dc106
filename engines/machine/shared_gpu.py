"""Memory of a GPU that an engine and a trainer rank have in turn, phase by phase. Pure.

    phase            of the engine                  of the trainer rank
    generating       weights, KV cache, process     process, and its state where both fit
    training         process asleep                 state, activations, process
    taking weights   weights, process               process, and its state where it stays

The phases are in the order of a hand-over. Weights leave the trainer through host memory before its
turn ends, so that engines, which take memory for theirs first and for their KV cache last, never
have them beside more of the trainer than stays anyway. A state that does not stay is in page-locked
host memory meanwhile: weights and moments, no gradients.
"""

from dataclasses import dataclass

from engines.learn.footprint import TrainerFootprint
from engines.pat.memory import PARKED_BYTES, USABLE_SHARE, Footprint


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory of the GPU in one phase."""

    name: str
    bytes: float
    parts: str


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """Memory that both want of one GPU."""

    engine: Footprint
    """Engines at work; of several layouts, all of them."""
    num_layouts: int
    trainer: TrainerFootprint
    """A rank at work."""
    resting_bytes: float
    """The rank's state between two steps (`resting_bytes`)."""
    gpu_bytes: float
    """The whole GPU's."""

    @property
    def usable_bytes(self) -> float:
        return self.gpu_bytes * USABLE_SHARE

    @property
    def state_leaves(self) -> bool:
        """Whether the trainer's state has to be in host memory while engines generate."""
        return self.engine.bytes + self.trainer.process_bytes + self.resting_bytes > (
            self.usable_bytes
        )

    @property
    def asleep_bytes(self) -> float:
        return PARKED_BYTES * self.num_layouts

    @property
    def phases(self) -> tuple[Phase, ...]:
        staying = 0.0 if self.state_leaves else self.resting_bytes
        trainer = self.trainer.process_bytes + staying
        waits = f"{_gb(trainer)} of the trainer, " + (
            f"whose other {_gb(self.resting_bytes)} are in host memory"
            if self.state_leaves
            else "which stays"
        )
        asleep = f"{_gb(self.asleep_bytes)} of engines asleep"
        weights = self.engine.weights_bytes + self.engine.process_bytes
        return (
            Phase("generating", self.engine.bytes + trainer, f"{self.engine}; {waits}"),
            Phase("training", self.trainer.bytes + self.asleep_bytes, f"{self.trainer}; {asleep}"),
            Phase(
                "taking weights",
                weights + trainer,
                f"{_gb(weights)} of engines without KV cache; {waits}",
            ),
        )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
