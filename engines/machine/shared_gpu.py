"""Memory of a GPU that an engine and a trainer rank have in turn, phase by phase. Pure.

    phase            of the engine                  of the trainer rank
    generating       weights, KV cache, process     process, and its state where both fit
    training         process asleep                 state, activations, process
    handing over     weights, what comes, process   state, what goes, process
    taking weights   weights, process               process, and its state where it stays

The phases are in the order of a hand-over. Weights leave the trainer through host memory before its
turn ends, so that engines, which take memory for theirs first and for their KV cache last, never
have them beside more of the trainer than stays anyway. With `rollout.weights: ipc` they have, for
as long as they are handed over on the GPU: the trainer's state, without gradients, a buffer and two
whole tensors of the trainer's, and of the engine's a copy of the buffer and a layer that is put
together. Whoever dies meanwhile takes them as before. A state that does not stay is in page-locked
host memory while engines generate: weights and moments, no gradients.
"""

from dataclasses import dataclass

from engines.latency.model_shape import ModelShape
from engines.learn.footprint import TrainerFootprint
from engines.pat.memory import PARKED_BYTES, USABLE_SHARE, Footprint

HANDED_AT_ONCE_BYTES = 256 * 2**20
"""Buffer through which weights are handed over on a GPU, unless a tensor is larger."""
HANDING_OVER = "handing over weights"


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
    handed_bytes: float | None = None
    """Bytes beside both copies of the weights while they are handed over on the GPU
    (`handed_bytes`); None: they are not."""

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
            *self._handing_over(weights),
            Phase(
                "taking weights",
                weights + trainer,
                f"{_gb(weights)} of engines without KV cache; {waits}",
            ),
        )

    def _handing_over(self, engine_bytes: float) -> tuple[Phase, ...]:
        if self.handed_bytes is None:
            return ()
        trainer = self.trainer.process_bytes + self.resting_bytes
        return (
            Phase(
                HANDING_OVER,
                engine_bytes + trainer + self.handed_bytes,
                f"{_gb(engine_bytes)} of engines without KV cache; {_gb(trainer)} of the trainer, "
                f"and {_gb(self.handed_bytes)} on their way",
            ),
        )


def handed_bytes(shape: ModelShape) -> float:
    """Bytes of a GPU beside both copies of the weights while they are handed over on it."""
    experts = 2 * (shape.num_experts or 1) * shape.intermediate_size * shape.hidden_size
    largest = shape.element_bytes * max(shape.head_params, experts)
    return 2.0 * max(HANDED_AT_ONCE_BYTES, largest) + 3.0 * largest


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
