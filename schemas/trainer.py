"""Settings of the trainer."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen
from schemas.resume import Free, Kept, Rounding
from schemas.secret import SecretUrl


class LoraConfig(Frozen):
    """Low-rank adapters in place of whole weights. Engines get the merged weights."""

    rank: PositiveInt = 32
    """Inner width of each adapter."""
    alpha: PositiveFloat = 32.0
    """An adapter's product is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = (
        "all-linear"
    )
    """Last parts of the names of the layers that get one, as in q_proj, by the names in the model's
    files; `all-linear`: all that peft has adapters for, but the output layer."""


class TrainerConfig(Frozen):
    """The optimiser and the processes that run it."""

    num_processes: Rounding[PositiveInt] = 1
    """Trainer processes; more than one shards the model with FSDP2."""
    num_replicas: Rounding[PositiveInt] = 1
    """Copies of the model, each sharded over num_processes / num_replicas of the processes (HSDP).
    With one for each node, only gradients go from node to node."""
    num_threads: Rounding[PositiveInt | None] = None
    """CPU threads of each trainer process. Default: what Ray gives an actor, on a CPU one."""
    dtype: Kept[Literal["float32", "bfloat16"]] = "float32"
    """Data type of the weights that the optimiser moves. In bfloat16 they take half the memory, and
    small updates are lost."""
    lora: Kept[LoraConfig | None] = None
    """Train low-rank adapters, and none of the model's own weights. Default: train these."""
    offload_optimizer: Free[bool] = False
    """Keep the optimiser's moments in host memory while no update is made: 8 bytes less a parameter
    of the GPUs', and time."""
    learning_rate: Kept[PositiveFloat] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: Kept[int] = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up."""
    decay: Kept[Literal["constant", "linear", "cosine"]] = "constant"
    """Course of the learning rate after the warm-up, over `decay_steps`."""
    decay_steps: Kept[PositiveInt | None] = None
    """Optimiser steps from the end of the warm-up until it is at its lowest, where it stays."""
    min_learning_rate: Kept[float] = Field(default=0.0, ge=0.0)
    """Learning rate that a decay ends at."""
    adam_beta1: Kept[float] = Field(default=0.9, ge=0.0, lt=1.0)
    """AdamW's share of the mean gradient that an update keeps."""
    adam_beta2: Kept[float] = Field(default=0.999, ge=0.0, lt=1.0)
    """AdamW's share of the mean squared gradient that an update keeps."""
    weight_decay: Kept[float] = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: Kept[PositiveFloat] = 1.0
    """The gradient's norm is clipped here."""
    max_skipped_updates: Free[int] = Field(default=3, ge=0)
    """Updates in a row that are left out, each for a loss or a gradient that is not finite, before
    the next one ends the run."""
    minibatches_per_step: Kept[PositiveInt | None] = None
    """Optimiser updates of a pass over a step's batch, over disjoint shares of its groups.
    Default: 4 for GSPO, 1 otherwise."""
    passes_per_step: Kept[PositiveInt] = 1
    """Passes over the batch of a step (PPO's epochs), each with the same minibatches."""
    micro_batch_tokens: Rounding[PositiveInt] = 16384
    """Tokens packed into one forward and backward pass."""
    gradient_checkpointing: Free[bool] = True
    """Recompute activations in the backward pass: far less memory, a third more time."""
    reshard: Free[bool] = True
    """Give the gathered weights back after each micro-batch. Off: they are gathered once an update,
    and each process holds the whole model in the engines' data type meanwhile."""
    save_every_steps: Free[PositiveInt] = 10
    """Steps between checkpoints, of 14 bytes a parameter in bfloat16 and 16 in float32. A crash
    loses the steps after the last one."""
    max_failures: Free[int] = Field(default=3, ge=0)
    """Crashes after which a run goes on by itself from its last checkpoint, for instance of a node,
    of Ray or of a trainer process. It ends with the next one, as with any other error: of settings,
    data, scorer or a full disk. `--resume` counts anew. 0: the first crash ends it."""
    keep_checkpoints: Free[PositiveInt] = 2
    """Newest checkpoints kept; the last of the run is always kept."""
    checkpoint_url: Free[SecretUrl | None] = None
    """Object store that they are copied to, below the run's name, and that a run whose own are gone
    resumes from: `s3://bucket/folder`, `gs://bucket/folder` or `file:///folder`. Keys come from the
    environment; those in the address, `s3://KEY:SECRET@bucket`, are shown in no record."""
    timeout_s: Free[PositiveFloat] = 3600.0
    """Longest time for one training step or checkpoint."""

    @model_validator(mode="after")
    def _decays_to_its_end(self) -> "TrainerConfig":
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(
                f"decay is {self.decay} and decay_steps is not given: say after how many optimiser "
                "steps it ends, steps of the run * minibatches_per_step * passes_per_step"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"min_learning_rate ({self.min_learning_rate:g}) is above learning_rate "
                f"({self.learning_rate:g}), which it decays from: lower it"
            )
        return self

    @model_validator(mode="after")
    def _replicas_are_whole(self) -> "TrainerConfig":
        if self.num_processes % self.num_replicas:
            raise ValueError(
                f"num_replicas ({self.num_replicas}) does not divide num_processes "
                f"({self.num_processes}): every replica is sharded over as many processes"
            )
        return self
