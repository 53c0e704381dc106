"""Settings of a profile: which model is measured, how, and over what range."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from refrain.schemas.base import Frozen
from refrain.schemas.drafting import DraftModels
from refrain.schemas.latency import Accuracy, PointKind, Profile
from refrain.schemas.resume import Free, Kept

PROFILES_DIR = "profiles"
"""Directory of all profiles, inside the directory of the runs."""
PROFILE_FILE = "profile.json"
"""File of a profile, in its directory."""

Windows = tuple[Annotated[int, Field(ge=1, le=64)], ...]


class ProfileConfig(Frozen):
    """Measure decode, prefill, verify and draft times of one model on this machine."""

    model: Kept[Path]
    """Local Hugging Face directory of a causal language model."""
    name: Free[str] = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    """Name of the profile and of its directory under runs/profiles, for example `qwen-h100`. Set it
    to measure a model twice. Empty: the model's name."""
    runs_dir: Free[Path] = Path("runs")
    """Directory that holds the runs; profiles go to its folder `profiles/`. Set it as for your
    runs."""
    trust_remote_code: Kept[bool] = False
    """Run Python code that comes with the models, as `model.trust_remote_code` of a training run
    does."""
    dtype: Kept[Literal["float32", "bfloat16"]] = "bfloat16"
    """Data type of the engines. Set it as for your runs (`model.dtype`)."""
    tp_degrees: Kept[tuple[PositiveInt, ...]] = Field(default=(1,), min_length=1)
    """TP degrees to measure, for example `[1, 2, 4]`. Each starts an engine. Name all that a run
    uses (`rollout.tp_degree`, `pat.tp_degrees`)."""
    shards: Kept[str | None] = None
    """Hardware by whose data sheet all-reduces are added, for example `H100`. One GPU then measures
    one shard of each TP degree. Set it if you have fewer GPUs than a TP degree. Default: measure
    engines of that TP degree on as many GPUs."""
    num_engines: Kept[PositiveInt] = 1
    """Engines that measure at the same time. CPU engines share the cores: set it to the number of
    engines of your run. One is enough on GPUs, which are not shared."""
    max_batch: Kept[int] = Field(default=256, ge=2)
    """Largest batch to measure, in sequences, for example `64`. Set it to your run's
    `rollout.max_num_seqs`."""
    max_context: Kept[PositiveInt | None] = None
    """Longest sequence to measure, in tokens, for example `9216`. Set it to the longest prompt and
    response of your run together. Default: the model's context, at most 16,384."""
    windows: Kept[Windows] = (1, 2, 4, 8, 16)
    """Draft windows, in tokens, to measure verification and drafting with. For example, `[1, 4,
    16]` takes less time. Empty: measure neither, for a run without drafts."""
    draft_models: Kept[DraftModels] = ()
    """Draft models to measure, besides n-gram lookup, as in `specactor.draft_models`. The
    `num_engines` of a model is the number of its processes that measure at the same time."""
    decode_steps: Kept[int] = Field(default=60, ge=2)
    """Engine steps that one point averages (PAT 4.2: 60), for example `20` for a quick look. Raise
    it if the machine's times vary much."""
    passes: Kept[PositiveInt] = 1
    """Times that decode and prefill are measured, each in another order, for example `3`. The fit
    averages them. Raise it if the machine's speed changes while it measures."""
    kv_cache_bytes: Kept[PositiveInt | None] = None
    """Bytes of one engine process's KV cache, as `rollout.kv_cache_bytes` of a training run. Raise
    it to measure larger batches or longer sequences."""
    enforce_eager: Kept[bool] = False
    """Skip compilation and CUDA graphs. Set it as for your runs (`rollout.enforce_eager`), because
    it changes the times."""
    seed: Kept[NonNegativeInt] = 0
    """Seed of the random prompts and of the order of the points, for example `1`. Change it to see
    how far times depend on them."""
    start_timeout_s: Free[PositiveFloat] = 1800.0
    """Longest time in seconds for an engine to start, for example `3600`. Raise it for a large
    model on a slow disk."""
    point_timeout_s: Free[PositiveFloat] = 600.0
    """Longest time in seconds for one point, for example `1200`. Raise it for long sequences on a
    slow machine."""

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / PROFILES_DIR / (self.name or self.model.resolve().name)

    @model_validator(mode="after")
    def _drafts(self) -> "ProfileConfig":
        if self.draft_models and not self.windows:
            raise ValueError(
                "draft_models need windows to draft: give some, for example [1, 2, 4, 8, 16]"
            )
        return self

    @model_validator(mode="after")
    def _ascending(self) -> "ProfileConfig":
        for name, values in (("tp_degrees", self.tp_degrees), ("windows", self.windows)):
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must ascend, each value once: {list(values)}")
        return self


class ProfileRun(Frozen):
    """A profile in progress, as its tasks see it. All paths are absolute."""

    config: ProfileConfig
    max_context: PositiveInt
    """Longest sequence to measure, in tokens."""
    num_gpus: NonNegativeInt
    """GPUs of the cluster. 0: everything runs on CPUs."""
    anew: bool = False
    """Whether an earlier profile stays in use until this one is finished."""


class Measurement(Frozen):
    """One point to measure. A decode measurement also gives the prefill point of its prompts."""

    kind: Literal[PointKind.DECODE, PointKind.VERIFY, PointKind.DRAFT]
    tp_degree: PositiveInt
    batch: PositiveInt
    prompt_tokens: PositiveInt
    """Tokens of each sequence before the first measured step."""
    window: NonNegativeInt = 0
    """Draft tokens of each sequence; for verify and draft."""
    drafter: str | None = None
    """Name of the drafter; for draft."""


class MachineFacts(Frozen):
    """Machine and limits of an engine, which it reports once it has started."""

    hardware: str
    max_active_tokens: PositiveInt
    """Tokens that its KV cache holds."""
    max_step_tokens: PositiveInt
    """Tokens that one of its steps processes. A larger batch is split."""
    versions: dict[str, str]


class ProfileReport(Frozen):
    """Result of a profile flow."""

    profile_file: Path
    profile: Profile
    held_out: tuple[Accuracy, ...]
    """Accuracy on points that were withheld from the fit, within the curves."""
    between_batches: tuple[Accuracy, ...]
    """Accuracy on batch sizes that were withheld entirely."""
