"""The configuration of a training run.

Each value is declared once, with its unit and bounds; what can be derived is a property.
The class defaults are the vetted setting. The form in the Prefect UI is made from this model,
so the top level stays flat: one object per concern, no unions at the top.
"""

import math
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from schemas.algorithm import MINIBATCHES, AlgorithmConfig
from schemas.base import Frozen, UnitInterval, refuse_unusable
from schemas.drafting import NGRAM, DrafterConfig, DraftingConfig, SpecActorConfig
from schemas.inputs import DataConfig, ModelConfig, Texts
from schemas.resume import Free, Kept, Rounding
from schemas.reward import BuiltinReward, RewardConfig
from schemas.rollout import Split
from schemas.sampling import SamplingConfig
from schemas.trainer import TrainerConfig


class RolloutConfig(Frozen):
    """How responses are generated."""

    num_engines: Free[PositiveInt] = 1
    """Data-parallel rollout engines, one Ray actor each."""
    tp_degree: Free[PositiveInt] = 1
    """GPUs (or CPU processes) that share one engine by tensor parallelism."""
    group_size: Kept[int] = Field(default=8, ge=2)
    """Responses sampled per prompt; group-relative advantages need at least two."""
    temperature: Kept[float] = Field(default=1.0, ge=0.0)
    """Divisor of the logits before sampling; 0, greedy, is for evaluations alone."""
    top_p: Kept[UnitInterval] = 1.0
    """Nucleus mass kept before sampling."""
    top_k: Kept[int] = Field(default=0, ge=0)
    """Tokens kept before sampling; 0 keeps all."""
    stop: Kept[Texts] = Field(default=(), max_length=16)
    """Texts, any of which ends a response, in validations and evaluations too: with the token that
    completes it, which is kept whole. Special tokens are part of the text that is looked at."""
    validation: Kept[SamplingConfig | None] = None
    """Sampling of validations and evaluations. Default: as in training."""
    max_num_seqs: Free[PositiveInt] = 256
    """Sequences that one engine decodes at once."""
    max_num_batched_tokens: Free[PositiveInt] = 8192
    """Tokens of one step of an engine: a piece of a prompt, sampled ones, drafts to verify."""
    gpu_memory_utilization: Free[float] = Field(default=0.92, gt=0.0, le=1.0)
    """Share of a GPU's memory for an engine that has it to itself. Those that share one take what
    they need beside `kv_cache_bytes`."""
    kv_cache_bytes: Free[PositiveInt | None] = None
    """KV cache of one engine process. Default: vLLM's own choice from free memory on a GPU,
    256 MiB on a CPU."""
    batch_invariant: Rounding[bool] = False
    """Have vLLM use kernels whose results do not depend on what else is in the batch
    (`VLLM_BATCH_INVARIANT`), in bfloat16 on a GPU: slower, and near-ties flip less."""
    enforce_eager: Free[bool] = False
    """Skip graph capture and compilation: a fast start and slow decoding. Always on for a CPU."""
    start_timeout_s: Free[PositiveFloat] = 1800.0
    """Longest time for an engine to load the model and come up."""
    stall_timeout_s: Free[PositiveFloat] = 600.0
    """An engine with work that reports nothing for this long is taken for dead."""
    max_restarts: Free[int] = Field(default=3, ge=0)
    """Times one engine may be restarted in a run before the run fails."""
    weights: Free[Literal["file", "ipc"]] = "file"
    """Way of new weights into engines. `file`: from shared memory of the node. `ipc`: from the
    trainer's memory on the same GPU, by vLLM's backend of that name, before the trainer's turn
    ends; the file is written too, for an engine that dies. Takes `placement: shared`, a trainer
    process on every GPU of the engines, and memory for both copies and a buffer. Not yet run on a
    GPU."""
    canary_tolerance: Free[PositiveFloat | None] = None
    """Largest mean |trainer - engine| log-probability of a sequence after a weight sync, in nats,
    for example 0.1. Default: 1e-3 in float32; in bfloat16 measured at each sync, a little more
    than rounding to bfloat16 changes the trainer's own."""
    metrics: Free[bool] = True
    """Export vLLM's metrics by Ray's, for Prometheus, where RAY_ADDRESS names a cluster."""

    def sampling(self, split: Split) -> "RolloutConfig | SamplingConfig":
        """Who has the temperature, `top_p` and `top_k` of a split."""
        return (self.validation if split is Split.VALIDATION else None) or self


class HistoPipeConfig(Frozen):
    """Engines that wait for nobody (RhymeRL, section 6): prompts ranked by the lengths of their
    last epoch, long and short ones in turn on every engine. With `mode: pipelined` only, but for
    `two_tier`."""

    enabled: bool = True
    """Off: each step's prompts are dealt evenly by expected work."""
    num_ranking_groups: Free[PositiveInt | None] = None
    """Prompts are ranked into so many groups. Default: one for every four engines, from 2 to 16."""
    two_tier: Free[bool] = True
    """Long ranking groups get more engines, by the run's `profile`, or without one by what engines
    measured of their steps, which those that draft do; and by the same figures the prompts of
    `mode: sync` with `specactor.race` are placed so that engines end together, where that is
    expected to end sooner. Off: every group gets as many engines, and every engine as much work."""
    migrate: bool = True
    """Move responses that outgrow their ranking group to other engines or to the next step."""
    last_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """Responses move only when so much of their ranking group is left."""
    min_growth: float = Field(default=1.1, ge=1.0)
    """A response counts as an outlier beyond at least so many times the longest of its group."""
    defer_share: float = Field(default=0.25, ge=0.0, le=1.0)
    """The longest ranking groups, as a share of all, defer their outliers to the next step; the
    others move them to another engine."""
    oversample: float = Field(default=0.05, ge=0.0, le=1.0)
    """Further prompts of a step, as a share of `prompts_per_step`. A step defers no more than what
    it has beyond `prompts_per_step`; what it has, it trains on."""


class PatConfig(Frozen):
    """More tensor parallelism when the batch has shrunk to its tail (PAT). No token changes."""

    tp_degrees: tuple[PositiveInt, ...] = ()
    """Higher TP degrees that a node's GPUs may go over to within a step, beside
    `rollout.tp_degree`; each is a multiple of the one before. When a switch pays is known from
    the run's `profile`, which must have them all. None: nothing of this is used."""
    lengths: Literal["history", "maximum"] = "history"
    """How long unfinished responses are taken to go on: as their prompt's did in its last epoch, or
    to `data.max_response_tokens`, as in the paper."""
    opening: Literal["best", "base"] = "best"
    """TP degree in which a step begins: of all of these and `rollout.tp_degree` the one that is
    predicted to end it soonest, or always the latter, as in the paper. It is the latter as long as
    no lengths are known, in `mode: pipelined`, and where `rollout.weights` is `ipc` and GPUs are
    shared with the trainer."""
    waits: bool = True
    """A switch is put off while a later one is predicted to be better still. Off: it is weighed
    against none at all, as in the paper."""
    kv: Literal["auto", "move", "recompute"] = "auto"
    """Keys and values of unfinished responses: whichever is faster, always moved, never moved."""
    parked_weights: Literal["auto", "resident", "reloaded"] = "auto"
    """Weights of the engines that wait on GPUs in another layout: kept current at every
    sync, or loaded at the switch. `auto`: kept where the GPUs have the memory."""
    gpus_per_node: PositiveInt = 8
    """GPUs among which layouts change."""
    switch_s: PositiveFloat = 0.5
    """Seconds that a switch costs, beside keys and values, until the run's own tell;
    `refrain bench switch` measures them."""
    kv_bytes_per_s: PositiveFloat = 2e9
    """Bytes per second between one GPU's keys and values and host memory, likewise."""


class EngineConfig(Frozen):
    """One rollout engine: its model, how it samples and drafts, and on which GPUs."""

    model: ModelConfig
    rollout: RolloutConfig
    max_model_len: PositiveInt
    """Tokens it must hold for one sequence."""
    seed: int = 0
    drafting: DraftingConfig = DraftingConfig(enabled=False)
    specactor: SpecActorConfig = SpecActorConfig()
    pooled: bool = False
    """Its GPUs may go over to another layout: it can be parked."""
    keeps_weights: bool = True
    """Its weights stay in memory while it is parked."""
    takes_turns: bool = False
    """Its GPUs are the trainer's, too: it sleeps meanwhile."""
    devices: tuple[int, ...] = ()
    """GPUs of its node, by rank; none: those that Ray gives it."""
    history_dir: Path = Path()
    """Directory of the index files."""
    profile_json: str | None = None
    """The run's `schemas.latency.Profile` as JSON, for the gate; None: step times are measured."""
    learnt: str = ""
    """See `schemas.counts.DraftingCounts`; empty: nothing yet."""
    exports_metrics: bool = False
    """vLLM's metrics are among those of its Ray node."""

    @property
    def speculates(self) -> bool:
        """Whether drafts may be verified."""
        specactor = self.specactor
        return self.drafting.enabled or bool(specactor.draft_models) or specactor.drafter == NGRAM

    @property
    def moves_kv(self) -> bool:
        """Whether it gives and takes keys and values of requests that go to another engine."""
        return self.pooled or (self.specactor.races and self.races_with_kv(self.max_model_len))

    def races_with_kv(self, num_tokens: int) -> bool:
        """Whether keys and values of so many tokens go along where their request is raced."""
        least = self.specactor.race_kv_tokens
        return least is not None and num_tokens >= least

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
                shared_noise=specactor.shared_noise,
                enforce_eager=rollout.enforce_eager,
                gpu_memory_share=specactor.gpu_memory_share,
                start_timeout_s=rollout.start_timeout_s,
            )
            for model in specactor.draft_models
            for _ in range(model.num_engines)
        )


_PROFILED = {"drafting", "specactor", "histopipe", "pat"}
"""Sections that make use of `TrainConfig.profile`."""


def _without_profile(name: str, section: Any) -> Any:
    """A section's values without an empty `profile`; one that names something is refused."""
    if not isinstance(section, dict) or "profile" not in section:
        return section
    if section["profile"]:
        raise ValueError(
            f"{name}.profile: there is one profile for the whole run: leave this out and set "
            f"profile={section['profile']}"
        )
    return {key: value for key, value in section.items() if key != "profile"}


class TrainConfig(Frozen):
    """A training run: RL from a local model on veRL-style data."""

    name: Free[str] = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """The run's name and the name of its directory. One that was used is refused, unless the run is
    resumed."""
    experiment: Free[str] = Field(default="refrain", min_length=1)
    """MLflow's experiment that the run begins in."""
    runs_dir: Free[Path] = Path("runs")
    """Directory that holds the runs."""
    seed: Kept[int] = Field(default=0, ge=0, lt=2**32)
    """Seed of sampling, data order and training."""
    mode: Kept[Literal["sync", "pipelined"]] = "sync"
    """`sync`: strictly on-policy, one step at a time. `pipelined`: the next step's rollouts go on
    while this one is scored and trained on; off-policyness is one policy version, two in the first
    tokens of a response that was deferred."""
    placement: Free[Literal["auto", "shared", "split"]] = "auto"
    """`shared`: every GPU has engines and a trainer process, which take turns; one GPU is enough.
    `split`: each has GPUs of its own. `auto`: shared in `mode: sync`, split in `mode: pipelined`,
    where both work at once."""
    num_epochs: Free[PositiveInt] = 1
    """Passes over the training prompts."""
    max_steps: Free[PositiveInt | None] = None
    """The run ends after so many RL steps at the latest. Default: after its epochs."""
    prompts_per_step: Kept[PositiveInt] = 64
    """Prompts of one RL step; the last step of an epoch takes what is left."""
    validate_every_steps: Free[int] = Field(default=0, ge=0)
    """Steps between validations; 0 validates before the first step and after the last only."""
    validation_samples: Kept[PositiveInt] = 1
    """Responses per validation prompt (`mean@n`)."""
    profile: Free[str | None] = None
    """How long a step takes, for all that weighs time: which drafts are verified
    (`drafting.gate`), which engine gets what (`histopipe.two_tier`), who drafts
    (`specactor.ladder`), when TP degrees change (`pat.tp_degrees`, which needs it), and what each
    technique saved. A profile made by `refrain profile`, its name or directory. Default: nobody
    knows beforehand; engines measure their steps while the run goes on."""
    model: Kept[ModelConfig]
    data: Kept[DataConfig]
    rollout: RolloutConfig = RolloutConfig()
    drafting: Free[DraftingConfig] = DraftingConfig()
    specactor: Free[SpecActorConfig] = SpecActorConfig()
    histopipe: Kept[HistoPipeConfig] = HistoPipeConfig()
    pat: Free[PatConfig] = PatConfig()
    reward: Kept[RewardConfig] = BuiltinReward()
    """Who scores the responses."""
    algorithm: Kept[AlgorithmConfig] = Field(
        default=AlgorithmConfig(), validate_default=True, json_schema_extra={"default": {}}
    )
    trainer: TrainerConfig = TrainerConfig()

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def takes_turns(self) -> bool:
        """Whether engines and trainer have the same GPUs, one after the other."""
        return self.placement == "shared" or (self.placement == "auto" and self.mode == "sync")

    @property
    def max_staleness(self) -> int:
        """Policy versions that a token may be behind the one that is trained."""
        return 1 if self.mode == "pipelined" else 0

    @property
    def num_minibatches(self) -> int:
        """Optimiser updates of a pass over a step's batch."""
        picked = min(MINIBATCHES.get(self.algorithm.type, 1), self.prompts_per_step)
        return self.trainer.minibatches_per_step or picked

    @property
    def ranks_prompts(self) -> bool:
        return self.mode == "pipelined" and self.histopipe.enabled

    @property
    def drawn_prompts_per_step(self) -> int:
        """Prompts of one step with those that are oversampled."""
        oversampled = self.ranks_prompts and self.histopipe.migrate
        share = self.histopipe.oversample if oversampled else 0.0
        return math.ceil(self.prompts_per_step * (1.0 + share))

    @property
    def tp_degrees(self) -> tuple[int, ...]:
        """TP degrees of the engines, ascending: the one in which a step begins, then those that it
        may go over to."""
        return (self.rollout.tp_degree, *self.pat.tp_degrees)

    @property
    def history_dir(self) -> Path:
        """Directory of the run's index files, absolute."""
        elsewhere = self.drafting.index_dir
        return (elsewhere / self.name if elsewhere else self.run_dir / "history").absolute()

    @property
    def max_model_len(self) -> int:
        """Tokens an engine must hold for one sequence."""
        return self.data.max_prompt_tokens + self.data.max_response_tokens

    @property
    def typical_context_tokens(self) -> float:
        """Context of a request that is planned for: in the middle of the longest response."""
        return self.data.max_prompt_tokens + self.data.max_response_tokens / 2

    @property
    def engine(self) -> EngineConfig:
        """Settings of each rollout engine, before its GPUs are known."""
        return EngineConfig(
            model=self.model,
            rollout=self.rollout,
            max_model_len=self.max_model_len,
            seed=self.seed,
            drafting=self.drafting,
            specactor=self.specactor,
            history_dir=self.history_dir,
        )

    @model_validator(mode="before")
    @classmethod
    def _one_profile(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return values | {
            name: _without_profile(name, values[name]) for name in _PROFILED & values.keys()
        }

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        refuse_unusable(self.model_dump())
        if self.algorithm.overlong_buffer_tokens >= self.data.max_response_tokens:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens ({self.algorithm.overlong_buffer_tokens}) is "
                f"not below data.max_response_tokens ({self.data.max_response_tokens}): every "
                "response would be punished; lower the first or raise the second"
            )
        if self.num_minibatches > self.prompts_per_step:
            raise ValueError(
                f"trainer.minibatches_per_step ({self.num_minibatches}) exceeds "
                f"prompts_per_step ({self.prompts_per_step}): a minibatch holds whole groups; "
                "lower the first or raise the second"
            )
        if self.trainer.micro_batch_tokens < self.max_model_len:
            raise ValueError(
                f"trainer.micro_batch_tokens ({self.trainer.micro_batch_tokens}) is below "
                f"data.max_prompt_tokens + data.max_response_tokens ({self.max_model_len}): one "
                "sample must fit; raise the first or lower the others"
            )
        if self.mode == "pipelined" and self.placement == "shared":
            raise ValueError(
                "placement is shared, and in mode=pipelined engines generate while the trainer "
                "trains: set mode=sync, or placement=split with GPUs for both"
            )
        if self.validate_every_steps and not self.data.validation:
            raise ValueError(
                "validate_every_steps is set but data.validation names no file: "
                "add one or set validate_every_steps to 0"
            )
        if self.rollout.temperature == 0.0:
            raise ValueError(
                "rollout.temperature is 0: every response of a group would be the same and no "
                "advantage could be learnt from; use a temperature above 0"
            )
        return self
