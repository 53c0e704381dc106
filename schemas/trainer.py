"""Settings of the trainer."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen
from schemas.resume import Free, Kept, Rounding
from schemas.secret import SecretUrl


class LoraConfig(Frozen):
    """Low-rank adapters, trained in place of the model's own weights. Engines get the merged
    weights."""

    rank: PositiveInt = 32
    """Inner width of each adapter. A larger one learns more and takes more memory."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their product is multiplied by alpha / rank."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = (
        "all-linear"
    )
    """Layers that get an adapter, by the last part of their names in the model's files, for example
    `[q_proj, v_proj]`. `all-linear`: all layers that peft has adapters for, except the output
    layer."""


class TrainerConfig(Frozen):
    """The optimiser and the processes that run it."""

    num_processes: Rounding[PositiveInt] = 1
    """Number of trainer processes. With more than one, FSDP2 shards the model over them."""
    num_replicas: Rounding[PositiveInt] = 1
    """Copies of the model (HSDP). Each is sharded over num_processes / num_replicas processes. With
    one per node, only gradients travel between nodes."""
    num_threads: Rounding[PositiveInt | None] = None
    """CPU threads of each trainer process. Default: what Ray gives an actor; on a CPU one."""
    dtype: Kept[Literal["float32", "bfloat16"]] = "float32"
    """Data type of the weights that the optimiser updates. `bfloat16` halves their memory but loses
    small updates."""
    lora: Kept[LoraConfig | None] = None
    """Low-rank adapters to train in place of the model's own weights, for example
    `{rank: 32, alpha: 32}`. Default: train the model's own weights."""
    offload_optimizer: Free[bool] = False
    """Keep the optimiser's moments in host memory between updates. It saves 8 bytes of GPU memory
    per parameter and takes time."""
    learning_rate: Kept[PositiveFloat] = 1e-6
    """Peak learning rate of AdamW. Adapters (`lora`) need a higher one, for example 1e-4."""
    warmup_steps: Kept[int] = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up."""
    decay: Kept[Literal["constant", "linear", "cosine"]] = "constant"
    """Schedule of the learning rate after the warm-up, over `decay_steps`."""
    decay_steps: Kept[PositiveInt | None] = None
    """Optimiser steps from the end of the warm-up to the lowest learning rate, which then stays."""
    min_learning_rate: Kept[float] = Field(default=0.0, ge=0.0)
    """Learning rate at the end of the decay."""
    adam_beta2: Kept[float] = Field(default=0.999, ge=0.0, lt=1.0)
    """AdamW's beta2: the share of the mean squared gradient that an update keeps."""
    weight_decay: Kept[float] = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay, for example 0.01."""
    max_grad_norm: Kept[PositiveFloat] = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    minibatches_per_step: Kept[PositiveInt | None] = None
    """Optimiser updates of one pass over a step's batch. Each takes its own share of the groups.
    Default: 4 for GSPO, 1 otherwise."""
    passes_per_step: Kept[PositiveInt] = 1
    """Passes over the batch of a step (PPO's epochs), each with the same minibatches."""
    micro_batch_tokens: Rounding[PositiveInt] = 16384
    """Tokens packed into one forward and backward pass. Lower it if the trainer runs out of memory;
    it must hold the longest prompt and response."""
    gradient_checkpointing: Free[bool] = True
    """Recompute activations in the backward pass. It takes far less memory and a third more
    time."""
    reshard: Free[bool] = True
    """Free the gathered weights after each micro-batch. Off: they are gathered once per update, and
    each process holds the whole model in the engines' data type meanwhile."""
    save_every_steps: Free[PositiveInt] = 10
    """Steps between checkpoints. A crash loses the steps after the last one. A checkpoint takes 14
    bytes per parameter in bfloat16, 16 in float32."""
    max_failures: Free[int] = Field(default=3, ge=0)
    """Crashes after which the run continues by itself from its last checkpoint, for example of a
    node, of Ray or of a trainer process. The next crash ends the run. Other errors always end it,
    for example wrong settings, data or scorers, or a full disk. `--resume` starts a new count. 0:
    the first crash ends the run."""
    keep_checkpoints: Free[PositiveInt] = 2
    """Newest checkpoints to keep. The last one of the run is always kept."""
    checkpoint_url: Free[SecretUrl | None] = None
    """Object store for copies of the checkpoints: `s3://bucket/folder`, `gs://bucket/folder` or
    `file:///folder`. A run that has lost its own checkpoints resumes from there, by its name. Keys
    come from the environment. You may also give them in the address, as in
    `s3://KEY:SECRET@bucket`; no record shows them."""
    timeout_s: Free[PositiveFloat] = 3600.0
    """Longest time in seconds for one training step or one checkpoint."""

    @model_validator(mode="after")
    def _decays_to_its_end(self) -> "TrainerConfig":
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(
                f"decay is {self.decay} and decay_steps is not given. Set it to the optimiser "
                "steps that the decay takes: at most steps of the run * minibatches_per_step * "
                "passes_per_step"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"trainer.min_learning_rate ({self.min_learning_rate:g}) is above "
                f"trainer.learning_rate ({self.learning_rate:g}), where the decay begins: lower it"
            )
        return self

    @model_validator(mode="after")
    def _replicas_are_whole(self) -> "TrainerConfig":
        if self.num_processes % self.num_replicas:
            raise ValueError(
                f"num_replicas ({self.num_replicas}) does not divide num_processes "
                f"({self.num_processes}): every replica needs the same number of processes. Change "
                "one of the two"
            )
        return self
