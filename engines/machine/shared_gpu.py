"""Memory of a GPU on which an engine and a trainer rank take turns, phase by phase. Pure.

    phase            engine                         trainer rank
    generating       weights, KV cache, process     process, and its state if both fit
    training         sleeping process               state, activations, process
    handing over     weights, buffers, process      state, buffers, process
    taking weights   weights, process               process, and its state if it stays

The phases are in the order of a step and its hand-over.

By default, the trainer copies its weights to host memory before its turn ends. The engine then
allocates memory for its weights, and for the KV cache last. So the GPU never has the engine's
weights beside more of the trainer than stays there anyway.

With `rollout.weight_sync: ipc`, the weights are handed over on the GPU. In this phase the GPU also
has the trainer's state without gradients. The trainer adds a buffer and two whole tensors. The
engine adds a copy of the buffer and one assembled layer. An engine that dies in this phase takes
the weights through host memory instead.

If the trainer's state does not fit beside a generating engine, its weights and moments (without
gradients) wait in page-locked host memory.
"""

from dataclasses import dataclass

from refrain.engines.latency.model_shape import ModelShape
from refrain.engines.machine.trainer_memory import TrainerFootprint
from refrain.engines.pat.memory import PARKED_BYTES, USABLE_SHARE, Footprint

HANDED_AT_ONCE_BYTES = 256 * 2**20
"""Size of the buffer that hands over weights on a GPU. For a larger tensor, the buffer grows."""
TRAINING = "training"
HANDING_OVER = "handing over weights"


@dataclass(frozen=True, slots=True)
class Phase:
    """GPU memory in one phase."""

    name: str
    bytes: float
    parts: str


@dataclass(frozen=True, slots=True)
class SharedGpu:
    """Memory that an engine and a trainer rank need on one GPU."""

    engine: Footprint
    """A generating engine, with all its layouts."""
    num_layouts: int
    trainer: TrainerFootprint
    """A rank that trains."""
    resting_bytes: float
    """The rank's state between two steps (`resting_bytes`)."""
    gpu_bytes: float
    """Total memory of the GPU."""
    handed_bytes: float | None = None
    """Buffers of a hand-over on the GPU, beside both copies of the weights (`handed_bytes`). None:
    weights are handed over through host memory."""

    @property
    def usable_bytes(self) -> float:
        return self.gpu_bytes * USABLE_SHARE

    @property
    def state_leaves(self) -> bool:
        """Whether the trainer's state must move to host memory while engines generate."""
        return self.engine.bytes + self.trainer.process_bytes + self.resting_bytes > (
            self.usable_bytes
        )

    @property
    def asleep_bytes(self) -> float:
        return PARKED_BYTES * self.num_layouts + self.engine.index_bytes

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
        weights = self.engine.bytes - self.engine.kv_cache_bytes
        return (
            Phase("generating", self.engine.bytes + trainer, f"{self.engine}; {waits}"),
            Phase(TRAINING, self.trainer.bytes + self.asleep_bytes, f"{self.trainer}; {asleep}"),
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
    """Return the bytes of a hand-over's buffers on a GPU, beside both copies of the weights."""
    experts = 2 * (shape.num_experts or 1) * shape.intermediate_size * shape.hidden_size
    largest = shape.element_bytes * max(shape.head_params, experts)
    return 2.0 * max(HANDED_AT_ONCE_BYTES, largest) + 3.0 * largest


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
