"""Settings of a training run.

Each value is declared once, with its unit and bounds. Derived values are properties. The defaults
are the recommended settings. The Prefect UI makes its form from this model, so the top level stays
flat: one object per concern, no unions at the top.
"""

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from refrain.schemas.algorithm import MINIBATCHES, AlgorithmConfig
from refrain.schemas.base import Frozen, UnitInterval, refuse_unusable
from refrain.schemas.drafting import (
    HISTORY,
    DrafterConfig,
    DraftingConfig,
    DraftingSection,
    SpecActorConfig,
)
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.inputs import DataConfig, ModelConfig, Texts, Trackers
from refrain.schemas.removed_settings import accept_renamed
from refrain.schemas.resume import Free, Kept, Rounding
from refrain.schemas.reward import BuiltinReward, RewardConfig
from refrain.schemas.rollout import Split
from refrain.schemas.sampling import SamplingConfig
from refrain.schemas.scheduling import HistoPipeConfig, PatConfig
from refrain.schemas.trainer import TraceConfig, TrainerConfig


class RolloutConfig(Frozen):
    """How engines generate responses."""

    num_engines: Free[PositiveInt] = 1
    """Number of rollout engines, each one Ray actor with a copy of the model. For example, `8` with
    `tp_degree: 1`: 8 GPUs. Raise it to use more GPUs."""
    tp_degree: Free[PositiveInt] = 1
    """Tensor parallelism: GPUs (or CPU processes) of one engine, for example `2`. It must divide
    the model's attention heads. Raise it if one GPU cannot hold the model and its KV cache."""
    placement: Kept[Literal["auto", "queue", "histopipe", "even"]] = "auto"
    """Which engine generates a response. `queue`: responses wait in one queue, longest expected
    first, and an engine takes the next when it has room. `histopipe`: ranking groups of prompts by
    the lengths of their last epoch. `even`: prompts are dealt by expected work. `auto`: the queue
    with `staleness`, `histopipe` without it or with `pat.tp_degrees`. Choose `even` if lengths do
    not repeat from epoch to epoch (`refrain report RUN`)."""
    weight_update: Free[Literal["drain", "in_flight"]] = "drain"
    """When an engine takes the weights of the next step. `drain`: when it has finished its part of
    this one. `in_flight`: when no response waits in the queue. Its unfinished responses go on with
    the new weights, and their KV cache is computed again. It needs `staleness` and the queue. Try
    it if engines run half empty at the end of a step."""
    oversample: Kept[float] = Field(default=0.05, ge=0.0, le=1.0)
    """Extra prompts of a step, as a share of `prompts_per_step`, with `staleness` and
    `placement: queue` or `histopipe`. For example, `0.1` draws 10 % more. A step defers at most
    these extra samples to the next one. Raise it if every step defers as many as it may
    (`rollout/num_deferred`); 0: none."""
    group_size: Kept[int] = Field(default=8, ge=2)
    """Responses sampled for each prompt: at least two, as their rewards are compared. For example,
    `16`. Raise it if too many groups have equal rewards (`critic/zero_variance_share`)."""
    temperature: Kept[float] = Field(default=1.0, ge=0.0)
    """The logits are divided by this before sampling. For example, `0.8`: less varied responses.
    Raise it if the responses of a group are too alike. 0 is greedy decoding, which evaluations and
    validations accept and training refuses."""
    top_p: Kept[UnitInterval] = 1.0
    """Nucleus sampling: draw from the likeliest tokens that have this share of the probability. For
    example, `0.9` leaves out the least likely tenth. Leave it at 1 in training: less biases the
    gradients."""
    top_k: Kept[int] = Field(default=0, ge=0)
    """Draw from this many of the most likely tokens, for example `50`. 0 draws from all. Leave it
    at 0 in training: anything else biases the gradients."""
    stop: Kept[Texts] = Field(default=(), max_length=16)
    """Stop strings, for example `["</answer>"]`: a response ends with the token that completes one
    of them, and keeps this token. Special tokens count as text. Validations and evaluations use the
    same. Set it if responses go on after their answer."""
    validation: Kept[SamplingConfig | None] = None
    """Sampling of validations and evaluations. Default: as in training."""
    max_num_seqs: Free[PositiveInt] = 256
    """Sequences that one engine decodes at the same time; further requests wait. For example, `64`.
    Lower it if an engine runs out of memory."""
    max_num_batched_tokens: Free[PositiveInt] = 8192
    """Tokens that one engine step processes at most: prompt chunks, sampled tokens and drafts to
    verify. For example, `16384`. Raise it for long prompts, lower it if an engine runs out of
    memory. At least `max_num_seqs`."""
    gpu_memory_utilization: Free[float] = Field(default=0.92, gt=0.0, le=1.0)
    """Share of a GPU's memory that an engine uses if it has the GPU to itself, for example `0.9`.
    Lower it if `--check` says so, or if other programs use the GPU. Engines that share a GPU take
    `kv_cache_bytes` and what they need besides."""
    kv_cache_bytes: Free[PositiveInt | None] = None
    """Size of the KV cache of one engine process, for example 8589934592 (8 GiB). Lower it if an
    engine runs out of memory; on GPUs `pat.tp_degrees` needs it. Default: vLLM chooses from the
    free memory on a GPU; 256 MiB on a CPU."""
    batch_invariant: Rounding[bool] = False
    """Use vLLM kernels whose results do not depend on the rest of the batch
    (`VLLM_BATCH_INVARIANT`). Acts only in bfloat16 on a GPU. Switch it on to have fewer near-ties
    flip; decoding is slower."""
    model_runner: Free[Literal["v1", "v2"]] = "v1"
    """The model runner of vLLM. `v2` is its newer one, for GPUs: engines that draft schedule a step
    while the one before runs, so drafting costs less. Try `v2` there, and compare the tokens a
    second; no token differs. It drafts from history and a draft head (draft models need `v1`)."""
    enforce_eager: Free[bool] = False
    """Skip compilation and CUDA graphs: a faster start, slower decoding. Switch it on for short
    trials. Always on for a CPU."""
    stall_timeout_s: Free[PositiveFloat] = 600.0
    """An engine that has work and reports nothing for this many seconds counts as dead. For
    example, `1200`: 20 minutes. Raise it if engines are restarted that only were slow. Engines and
    drafters have five times as long to start."""
    weight_sync: Free[Literal["file", "ipc"]] = "file"
    """How engines get new weights. `file`: from a file in the node's shared memory. `ipc`: vLLM
    copies them from the trainer on the same GPU, before the trainer's turn ends. It needs
    `placement: shared`, a trainer process on every GPU of the engines, and memory for both copies
    and a buffer. Try `ipc` if syncs take long: on an H200, 3.4 GB took 0.3 s in place of 2.6 s.
    Engines that die use the file in any case."""
    canary_tolerance: Free[PositiveFloat | None] = None
    """Largest mean |trainer - engine| log-probability of a sequence after a weight sync, in nats,
    for example `0.1`. Set it if the check fails in bfloat16 and holds in float32. Default: 1e-3 in
    float32. In bfloat16 each sync measures it: a little more than rounding to bfloat16 changes the
    trainer's own."""

    @property
    def start_timeout_s(self) -> float:
        """Longest time in seconds for an engine or a drafter to load the model and start."""
        return 5.0 * self.stall_timeout_s

    def sampling(self, split: Split) -> "RolloutConfig | SamplingConfig":
        """Return the config that has the temperature, `top_p` and `top_k` of a split."""
        return (self.validation if split is Split.VALIDATION else None) or self


class EngineConfig(Frozen):
    """Settings of one rollout engine: its model, sampling, drafting and use of GPUs. What it starts
    with besides is a `schemas.engine.EngineSetup`."""

    model: ModelConfig
    rollout: RolloutConfig
    max_model_len: PositiveInt
    """Longest sequence in tokens, prompt and response together."""
    seed: int = 0
    drafting: DraftingConfig = DraftingConfig(enabled=False)
    specactor: SpecActorConfig = SpecActorConfig()
    pooled: bool = False
    """Whether its GPUs may switch to another layout, so that it can be parked."""
    takes_turns: bool = False
    """Whether it shares its GPUs with the trainer, and sleeps while the trainer works."""
    environment: EnvironmentConfig | None = None
    """Environment that answers its turns. None: every response is a single turn."""
    history_dir: Path = Path()
    """Directory of the index files."""
    races_with_kv: bool = True
    """Whether requests can take their KV cache along to a race."""
    trace: TraceConfig | None = None
    record_experts: bool = False
    """Whether rollouts bring the experts of their tokens (`trainer.routing_replay`)."""

    @property
    def speculates(self) -> bool:
        """Whether the engine may verify drafts."""
        return self.drafting.enabled or self.specactor.drafts

    @property
    def moves_kv(self) -> bool:
        """Whether requests bring and take their KV cache when they move to another engine."""
        return self.pooled or (self.specactor.races and self.races_with_kv)

    @property
    def max_draft(self) -> int:
        """Longest draft of any drafter, in tokens."""
        return max(self.drafting.max_draft, self.specactor.window)

    @property
    def drafter_processes(self) -> tuple[DrafterConfig, ...]:
        """Settings of each drafter process."""
        specactor, rollout = self.specactor, self.rollout
        return tuple(
            DrafterConfig(
                name=model.name,
                path=model.path,
                trust_remote_code=self.model.trust_remote_code,
                dtype=self.model.dtype,
                max_model_len=self.max_model_len,
                max_num_seqs=rollout.max_num_seqs,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                enforce_eager=rollout.enforce_eager,
                start_timeout_s=rollout.start_timeout_s,
            )
            for model in specactor.draft_models
            for _ in range(model.num_engines)
        )


class TrainConfig(Frozen):
    """A training run: RL of a local model on data in veRL's format."""

    name: Free[str] = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Name of the run and of its directory, for example `gsm8k`: at most 64 letters, digits, `.`,
    `_` and `-`. Choose a new one for each run. A name that is taken is refused, unless you resume
    that run."""
    runs_dir: Free[Path] = Path("runs")
    """Directory that holds all runs, for example `/files/runs`. Change it if this disk is too
    small, or if other nodes do not see it."""
    seed: Kept[int] = Field(default=0, ge=0, lt=2**32)
    """Seed of sampling, data order and training. For example, `1`: other samples, in another order.
    Change it to repeat an experiment with other noise."""
    staleness: Kept[int] = Field(default=0, ge=0, le=16)
    """Policy versions that a response may be behind the one that is trained. 0: one step at a time,
    strictly on-policy. For example, `1`: engines generate the next step while this one is trained
    on (RhymeRL). Raise it if engines wait for the trainer or for the last responses. Above 2, set
    `algorithm.tis_cap`."""
    placement: Free[Literal["auto", "shared", "split"]] = "auto"
    """`shared`: engines and trainer take turns on the same GPUs; one GPU is enough. `split`: each
    has GPUs of its own. `auto`: shared with `staleness: 0`, split otherwise. Leave `auto`, unless
    `refrain simulate --divide` finds the other one faster."""
    num_epochs: Free[PositiveInt] = 1
    """Passes over the training prompts, for example `10`. Raise it if the reward still rises at the
    end. Drafts from history start in the second one."""
    max_steps: Free[PositiveInt | None] = None
    """End the run after so many RL steps. For example, `2`: a short trial. Default: none."""
    prompts_per_step: Kept[PositiveInt] = 64
    """Prompts of one RL step. For example, `128` with `group_size: 16`: 2,048 responses a step.
    Raise it for steadier updates, lower it for shorter steps. The last step of an epoch takes the
    prompts that are left."""
    validate_every_steps: Free[int] = Field(default=0, ge=0)
    """RL steps between validations, for example `20`. 0 validates before the first step and after
    the last only. Set it to follow the progress of a long run."""
    validation_samples: Kept[PositiveInt] = 1
    """Responses per validation prompt, the n of `mean@n`, for example `8`. Raise it if few
    validation prompts make the mean noisy."""
    profile: Free[str | None] = None
    """Name or directory of measured engine times, for example `mine` after `refrain profile --name
    mine`. Drafts, placement, the choice of drafters and the savings of each technique use it. Set
    it for `pat.tp_degrees` and `specactor.split_gpus`, which need it. Default: engines measure
    their steps while the run goes on."""
    trackers: Free[Trackers] = ("mlflow",)
    """Where metrics and settings go, for example `[mlflow, wandb]`. MLflow always has the whole
    record. Add a tracker if your team compares its runs there; `pip install` its package first."""
    model: Kept[ModelConfig]
    data: Kept[DataConfig]
    rollout: RolloutConfig = RolloutConfig()
    drafting: Free[DraftingSection] = DraftingSection()
    specactor: Free[SpecActorConfig] = SpecActorConfig()
    histopipe: Kept[HistoPipeConfig] = HistoPipeConfig()
    pat: Free[PatConfig] = PatConfig()
    reward: Kept[RewardConfig] = BuiltinReward()
    """How responses are scored."""
    environment: Kept[EnvironmentConfig | None] = None
    """Tools or an environment of yours, for example `{path: calculator.py}`. Default: a response is
    a single turn."""
    algorithm: Kept[AlgorithmConfig] = Field(
        default=AlgorithmConfig(), validate_default=True, json_schema_extra={"default": {}}
    )
    trainer: TrainerConfig = TrainerConfig()

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainer take turns on the same GPUs."""
        return self.placement == "shared" or (self.placement == "auto" and not self.staleness)

    @property
    def num_minibatches(self) -> int:
        """Optimiser updates of one pass over a step's batch."""
        picked = min(MINIBATCHES.get(self.algorithm.type, 1), self.prompts_per_step)
        return self.trainer.minibatches_per_step or picked

    @property
    def sample_placement(self) -> str:
        """`rollout.placement` with `auto` resolved."""
        if self.rollout.placement != "auto":
            return self.rollout.placement
        return "queue" if self.staleness and not self.pat.tp_degrees else "histopipe"

    @property
    def rewards(self) -> tuple[RewardConfig, ...]:
        """`reward`, and the rewards of sources that have their own."""
        return (self.reward, *self.data.own_rewards.values())

    @property
    def ranks_prompts(self) -> bool:
        return self.staleness > 0 and self.sample_placement == "histopipe"

    @property
    def defers(self) -> bool:
        """Whether a step may defer samples to the next one."""
        ranked = self.ranks_prompts and self.histopipe.last_share > 0.0
        queued = self.staleness > 0 and self.sample_placement == "queue"
        grouped = any(reward.group for reward in self.rewards)
        return (ranked or queued) and not self.algorithm.refills and not grouped

    @property
    def drawn_prompts_per_step(self) -> int:
        """Prompts of one step, the oversampled ones included."""
        share = self.rollout.oversample if self.defers else 0.0
        return math.ceil(self.prompts_per_step * (1.0 + share))

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """TP degrees of the engines, ascending, `rollout.tp_degree` first."""
        return (self.rollout.tp_degree, *self.pat.tp_degrees)

    @property
    def history_dir(self) -> Path:
        """Directory of the run's index files, absolute."""
        elsewhere = self.drafting.index_dir
        return (elsewhere / self.name if elsewhere else self.run_dir / "history").absolute()

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt and response together."""
        return self.data.max_prompt_tokens + self.data.max_response_tokens

    @property
    def typical_context_tokens(self) -> float:
        """Context that plans assume for a request: the middle of the longest response."""
        return self.data.max_prompt_tokens + self.data.max_response_tokens / 2

    @property
    def engine(self) -> EngineConfig:
        """Settings of each rollout engine, before its GPUs are known."""
        return EngineConfig(
            model=self.model,
            rollout=self.rollout,
            max_model_len=self.max_model_len,
            seed=self.seed,
            drafting=DraftingConfig(**dict(self.drafting)),
            specactor=self.specactor,
            environment=self.environment,
            history_dir=self.history_dir,
            trace=self.trainer.trace(self.run_dir),
            record_experts=self.trainer.routing_replay,
        )

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, values: Any) -> Any:
        return accept_renamed(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        refuse_unusable(self.model_dump())
        self.algorithm.check_rollouts(
            staleness=self.staleness, defers=self.defers, temperature=self.rollout.temperature
        )
        if self.algorithm.overlong_buffer_tokens >= self.data.max_response_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens ({self.algorithm.overlong_buffer_tokens}) is "
                f"not below data.max_response_tokens ({self.data.max_response_tokens}): every "
                "response would be penalised; lower the first or raise the second"
            )
        if self.num_minibatches > self.prompts_per_step:
            raise ValueError(
                f"trainer.minibatches_per_step ({self.num_minibatches}) exceeds "
                f"prompts_per_step ({self.prompts_per_step}): a minibatch holds whole groups; "
                "lower the first or raise the second"
            )
        self.trainer.check_fits(self.max_model_len)
        specactor = self.specactor
        if specactor.head and self.pat.tp_degrees:
            raise ValueError(
                "specactor.head drafts in one layout of the engines, and pat.tp_degrees switches "
                "between several: set pat.tp_degrees to [], or remove specactor.head"
            )
        queued = self.staleness and self.sample_placement == "queue" and not self.pat.tp_degrees
        if self.rollout.weight_update == "in_flight" and not queued:
            raise ValueError(
                "rollout.weight_update is in_flight: set staleness to 1 or more, and leave "
                "rollout.placement and pat.tp_degrees unset; or weight_update: drain"
            )
        if self.staleness and self.placement == "shared":
            raise ValueError(
                f"placement is shared, and with staleness={self.staleness} engines generate while "
                "the trainer trains: set staleness=0, or placement=split with GPUs for both"
            )
        if self.validate_every_steps and not self.data.validation:
            raise ValueError(
                "validate_every_steps is set but data.validation names no file: "
                "add one or set validate_every_steps to 0"
            )
        if self.environment is None and "environment" in {one.type for one in self.rewards}:
            raise ValueError(
                "reward.type is environment, but there is no environment: set environment.path to "
                "your Python file, or score with another reward.type"
            )
        if self.rollout.temperature == 0.0:
            raise ValueError(
                "rollout.temperature is 0: every response of a group would be the same, and every "
                "advantage 0. Set it above 0, for example to 1.0"
            )
        return self

    @model_validator(mode="after")
    def _runner_can(self) -> "TrainConfig":
        if self.rollout.model_runner == "v1":
            return self
        if self.trainer.routing_replay:
            raise ValueError("trainer.routing_replay needs rollout.model_runner: v1. Set v1 there")
        if self.specactor.draft_models or self.specactor.drafter != HISTORY:
            raise ValueError(
                "rollout.model_runner: v2 drafts from history and a head only: remove "
                "specactor.draft_models and specactor.drafter, or set model_runner: v1"
            )
        return self
