"""Settings of the trainer."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from refrain.schemas.base import Frozen
from refrain.schemas.resume import Free, Kept, Rounding
from refrain.schemas.secret import SecretUrl


class LoraConfig(Frozen):
    """Low-rank adapters, trained in place of the model's own weights. Engines get the merged
    weights."""

    rank: PositiveInt = 32
    """Inner width of each adapter, for example `64`. A larger one learns more and takes more
    memory."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: their product is multiplied by alpha / rank. For example, `64` with
    rank 32: by 2. Raise it if updates do not reach the engines (`actor/lora_arrived`)."""
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = (
        "all-linear"
    )
    """Layers that get an adapter, by the last part of their names in the model's files. For
    example, `[q_proj, v_proj]`: fewer adapters, less memory. `all-linear`: all layers that peft has
    adapters for, except the output layer."""


class TraceConfig(Frozen):
    """Where the profiler writes traces of a step."""

    step: PositiveInt
    directory: Path


class TrainerConfig(Frozen):
    """The optimiser and the processes that run it."""

    num_processes: Rounding[PositiveInt] = 1
    """Number of trainer processes, for example `8`: one on each of 8 GPUs. With more than one,
    FSDP2 shards the model over them. Raise it if the model does not fit, or training takes too
    long."""
    num_replicas: Rounding[PositiveInt] = 1
    """Copies of the model (HSDP), for example `2` on two nodes. Each is sharded over num_processes
    / num_replicas processes. With one per node, only gradients travel between nodes. Raise it if
    the network between nodes is slow and memory suffices."""
    context_parallel: Rounding[PositiveInt] = 1
    """Trainer processes that share each row of tokens (Ulysses), for example `4`: a sample may have
    4 * `micro_batch_tokens` tokens. FSDP2 shards the model over all processes as before. It must
    divide `num_processes` and the model's attention heads. Raise it if one sample is too long for
    the memory of a GPU."""
    num_threads: Rounding[PositiveInt | None] = None
    """CPU threads of each trainer process, for example `4`. Raise it if you train on a CPU with
    free cores. Default: what Ray gives an actor; on a CPU one."""
    dtype: Kept[Literal["float32", "bfloat16"]] = "float32"
    """Data type of the weights that the optimiser updates. `bfloat16` halves their memory but loses
    small updates. Choose it only if nothing else makes the model fit."""
    lora: Kept[LoraConfig | None] = None
    """Low-rank adapters to train in place of the model's own weights, for example `{rank: 32,
    alpha: 32}`. Set it if the model does not fit: gradients and moments are those of the adapters
    only. Default: train the model's own weights."""
    offload_optimizer: Free[bool] = False
    """Keep the optimiser's moments in host memory between updates. It saves 8 bytes of GPU memory
    per parameter (4 with `dtype: bfloat16`) and takes time. Switch it on if the trainer runs out of
    memory."""
    learning_rate: Kept[PositiveFloat] = 1e-6
    """Peak learning rate of AdamW, for example `2e-6`. Lower it if the reward falls or the loss
    jumps. Adapters (`lora`) need a higher one, for example 1e-4."""
    warmup_steps: Kept[int] = Field(default=0, ge=0)
    """Optimiser updates of linear warm-up, for example `20`. Raise it if the first updates upset
    the policy."""
    decay: Kept[Literal["constant", "linear", "cosine"]] = "constant"
    """Schedule of the learning rate after the warm-up, over `decay_steps`. `linear` and `cosine`
    end at `min_learning_rate`. Choose one if the reward swings late in a run."""
    decay_steps: Kept[PositiveInt | None] = None
    """Optimiser updates from the end of the warm-up to the lowest learning rate, which then stays.
    For example, `480`. Set it to the updates of the run less `warmup_steps`; `linear` and `cosine`
    need it."""
    min_learning_rate: Kept[float] = Field(default=0.0, ge=0.0)
    """Learning rate at the end of the decay, for example `1e-7`. Raise it if the policy should go
    on learning after the decay."""
    adam_beta2: Kept[float] = Field(default=0.999, ge=0.0, lt=1.0)
    """AdamW's beta2: the share of the mean squared gradient that an update keeps. For example,
    `0.95` averages over about 20 updates, the default over about 1000. Lower it for a run of few
    updates."""
    weight_decay: Kept[float] = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay. For example, `0.01`: an update also multiplies each weight by
    1 - 0.01 * learning rate. Leave it at 0, unless weights grow too large."""
    max_grad_norm: Kept[PositiveFloat] = 1.0
    """Gradients with a larger norm are scaled down to this norm. For example, `0.5`. Lower it if
    single updates upset the policy (`actor/grad_norm`)."""
    minibatches_per_step: Kept[PositiveInt | None] = None
    """Optimiser updates of one pass over a step's batch. For example, `4` with 64 prompts: 16
    groups an update. Raise it to learn more from a step; later updates are then off-policy.
    Default: 1; 4 for gspo, sapo, icepop and areal, 8 for gmpo and dppo, 16 for cispo."""
    passes_per_step: Kept[PositiveInt] = 1
    """Passes over the batch of a step (PPO's epochs), each with the same minibatches. For example,
    `2`: twice the updates. Raise it if generating takes most of the time; later updates are then
    off-policy."""
    micro_batch_tokens: Rounding[PositiveInt] = 16384
    """Tokens that a process packs into one forward and backward pass, for example `8192`. Lower it
    if the trainer runs out of memory. `context_parallel` times as many must hold the longest prompt
    and response."""
    gradient_checkpointing: Free[Literal["auto"] | bool] = "auto"
    """Recompute activations in the backward pass. It takes far less memory and a third more time.
    `auto`: as few layers as the GPU's memory needs, and all layers on a CPU. For example, `true`
    if `auto` runs out of memory: all layers."""
    compile: Rounding[Literal["auto"] | bool] = "auto"
    """Compile the decoder layers and the scores of tokens (`torch.compile`). It fuses norms, rope
    and activations, so an update takes less time and less memory, and rounds otherwise. `auto`:
    dense models on CUDA. For example, `false` if the compiler fails or you compare runs bit for
    bit."""
    routing_replay: Kept[bool] = False
    """For mixtures of experts: train each token with the experts that the engine chose for it in
    the rollout. Rounding makes the trainer's routers choose others for some tokens, and then
    log-probabilities differ (`mismatch/k3`). Gradients still reach the routers. For example,
    `true` for Qwen3-30B-A3B in bfloat16, if `mismatch/k3` is far above that of a dense model.
    Needs `rollout.model_runner: v1`."""
    save_every_steps: Free[PositiveInt] = 10
    """RL steps between checkpoints, for example `50`. A crash loses the steps after the last one. A
    checkpoint takes 14 bytes per parameter in bfloat16, 16 in float32. Lower it on machines that
    often fail, raise it if writing takes long."""
    max_failures: Free[int] = Field(default=3, ge=0)
    """Crashes, as of a node, of Ray or of a trainer process, after which the run continues by
    itself from its last checkpoint. One more ends the run; wrong settings, data or scorers, or a
    full disk, end it at once. `--resume` starts a new count. For example, `10` for machines that
    often fail; 0: the first crash ends the run."""
    keep_checkpoints: Free[PositiveInt] = 2
    """Newest checkpoints to keep, for example `5`. Raise it to evaluate earlier ones, lower it if
    the disk is full. The last one of the run is always kept."""
    checkpoint_url: Free[SecretUrl | None] = None
    """Object store for copies of the checkpoints: `s3://bucket/folder`, `gs://bucket/folder` or
    `file:///folder`. Set it if the run's disk may be lost: the run then resumes from there, by its
    name. Keys come from the environment. You may also give them in the address, as in
    `s3://KEY:SECRET@bucket`; no record shows them."""
    timeout_s: Free[PositiveFloat] = 3600.0
    """Longest time in seconds for one training step or one checkpoint. For example, `7200`: two
    hours. Raise it if a large batch takes longer."""
    trace_step: Free[PositiveInt | None] = None
    """Step of which torch's profiler writes Chrome traces to `traces` in the run's directory: the
    whole update of each trainer process, and the first forward passes of each engine. For example,
    `3`, when the first steps have warmed up. Set it to see what takes the time; the traced step is
    slower. Default: no trace."""

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row, over all processes that share it."""
        return self.micro_batch_tokens * self.context_parallel

    def check_fits(self, max_tokens: int) -> None:
        """Raise ValueError when a sample of `max_tokens` tokens does not fit into a row."""
        if self.row_tokens >= max_tokens:
            return
        shared, more = "", "raise the first, raise trainer.context_parallel"
        if self.context_parallel > 1:
            shared = f" * trainer.context_parallel ({self.context_parallel})"
            more = "raise one of the first two"
        raise ValueError(
            f"trainer.micro_batch_tokens ({self.micro_batch_tokens}){shared} is below "
            f"data.max_prompt_tokens + data.max_response_tokens ({max_tokens}): one sample must "
            f"fit; {more} or lower the others"
        )

    def trace(self, run_dir: Path) -> TraceConfig | None:
        """Return which step to trace, and where to, in this run."""
        if self.trace_step is None:
            return None
        directory = run_dir / "traces" / f"step_{self.trace_step}"
        return TraceConfig(step=self.trace_step, directory=directory.absolute())

    @model_validator(mode="after")
    def _decays_to_its_end(self) -> "TrainerConfig":
        if self.decay != "constant" and self.decay_steps is None:
            raise ValueError(
                f"trainer.decay is {self.decay} and decay_steps is not given. Set it to the "
                "optimiser steps that the decay takes: at most steps of the run * "
                "minibatches_per_step * passes_per_step"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"trainer.min_learning_rate ({self.min_learning_rate:g}) is above "
                f"trainer.learning_rate ({self.learning_rate:g}), where the decay begins: lower it"
            )
        return self

    @model_validator(mode="after")
    def _routers_are_not_compiled(self) -> "TrainerConfig":
        if self.routing_replay and self.compile is True:
            raise ValueError(
                "trainer.routing_replay changes what routers choose, which compiled layers "
                "(trainer.compile: true) do not follow: set compile: false, or routing_replay: "
                "false"
            )
        if self.routing_replay and self.context_parallel > 1:
            raise ValueError(
                "trainer.routing_replay needs whole rows, and trainer.context_parallel shares them "
                "among processes: set context_parallel: 1, or routing_replay: false"
            )
        return self

    @model_validator(mode="after")
    def _contexts_are_whole(self) -> "TrainerConfig":
        if self.num_processes % self.context_parallel:
            raise ValueError(
                f"trainer.context_parallel ({self.context_parallel}) does not divide "
                f"trainer.num_processes ({self.num_processes}): each row is shared by that many "
                "processes. Change one of the two"
            )
        return self

    @model_validator(mode="after")
    def _replicas_are_whole(self) -> "TrainerConfig":
        if self.num_processes % self.num_replicas:
            raise ValueError(
                f"trainer.num_replicas ({self.num_replicas}) does not divide "
                f"trainer.num_processes ({self.num_processes}): every replica needs the same "
                "number of processes. Change one of the two"
            )
        return self
