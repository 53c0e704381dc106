"""Settings of the trainer."""

from pydantic import Field, PositiveFloat, PositiveInt

from schemas.base import Frozen
from schemas.resume import Free, Kept, Rounding
from schemas.secret import SecretUrl


class TrainerConfig(Frozen):
    """The optimiser and the processes that run it."""

    num_processes: Rounding[PositiveInt] = 1
    """Trainer processes; more than one shards the model with FSDP2."""
    num_threads: Rounding[PositiveInt | None] = None
    """CPU threads of each trainer process. Default: what Ray gives an actor, on a CPU one."""
    learning_rate: Kept[PositiveFloat] = 1e-6
    """Peak learning rate of AdamW."""
    warmup_steps: Kept[int] = Field(default=0, ge=0)
    """Optimiser steps of linear warm-up."""
    weight_decay: Kept[float] = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: Kept[PositiveFloat] = 1.0
    """The gradient's norm is clipped here."""
    minibatches_per_step: Kept[PositiveInt] = 1
    """Optimiser updates per RL step, over disjoint shares of its groups."""
    micro_batch_tokens: Rounding[PositiveInt] = 16384
    """Tokens packed into one forward and backward pass."""
    gradient_checkpointing: Free[bool] = False
    """Recompute activations in the backward pass: less memory, more time."""
    save_every_steps: Free[PositiveInt] = 1
    """Steps between checkpoints. A crash loses the steps after the last one."""
    keep_checkpoints: Free[PositiveInt] = 2
    """Newest checkpoints kept; the last of the run is always kept."""
    checkpoint_url: Free[SecretUrl | None] = None
    """Object store that they are copied to, below the run's name, and that a run whose own are gone
    resumes from: `s3://bucket/folder`, `gs://bucket/folder` or `file:///folder`. Keys come from the
    environment; those in the address, `s3://KEY:SECRET@bucket`, are shown in no record."""
    timeout_s: Free[PositiveFloat] = 3600.0
    """Longest time for one training step or checkpoint."""
