"""The configuration of a profile: which model is measured, how, and over what range."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from schemas.base import Frozen
from schemas.drafting import DraftModels
from schemas.latency import Accuracy, PointKind, Profile
from schemas.resume import Free, Kept

PROFILES_DIR = "profiles"
"""Directory of all profiles, in that of the runs."""
PROFILE_FILE = "profile.json"
"""A profile, in its directory."""

Windows = tuple[Annotated[int, Field(ge=1, le=64)], ...]


class ProfileConfig(Frozen):
    """Measure one model on this machine once: decode, prefill, verify and draft times."""

    model: Kept[Path]
    """Local Hugging Face directory of a causal language model."""
    name: Free[str] = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    """The profile's name and that of its directory under runs/profiles. Empty: the model's."""
    runs_dir: Free[Path] = Path("runs")
    """Directory that holds the runs, and the profiles in `profiles/`."""
    trust_remote_code: Kept[bool] = False
    """Run Python code that comes with the models, like `model.trust_remote_code` of a training
    run."""
    dtype: Kept[Literal["float32", "bfloat16"]] = "bfloat16"
    """Data type of the engines."""
    tp_degrees: Kept[tuple[PositiveInt, ...]] = Field(default=(1,), min_length=1)
    """TP degrees to measure, one engine start each."""
    shards: Kept[str | None] = None
    """Measure each TP degree by one of its shards, on one GPU, and add its all-reduces by the data
    sheet of this hardware. Default: engines of that TP degree, on as many GPUs."""
    num_engines: Kept[PositiveInt] = 1
    """Engines that measure at the same time. On a CPU engines share the cores: give as many as a
    run has. GPUs are not shared, so one is enough there."""
    max_batch: Kept[int] = Field(default=256, ge=2)
    """Largest batch: the engine's `max_num_seqs`."""
    max_context: Kept[PositiveInt | None] = None
    """Longest sequence, in tokens. Default: the model's context, at most 16,384."""
    windows: Kept[Windows] = (1, 2, 4, 8, 16)
    """Draft windows to time verification and drafting with; none leaves both out."""
    draft_models: Kept[DraftModels] = ()
    """Small models to time drafting with, beside n-gram lookup. `num_engines` of one are its
    processes that measure at the same time."""
    decode_steps: Kept[int] = Field(default=60, ge=2)
    """Steps averaged for one point (PAT 4.2: 60)."""
    passes: Kept[PositiveInt] = 1
    """Times that decode and prefill are measured, in another order each; the fit averages."""
    kv_cache_bytes: Kept[PositiveInt | None] = None
    """Bytes of one engine process's KV cache, like `rollout.kv_cache_bytes` of a training run."""
    enforce_eager: Kept[bool] = False
    """No graph capture and compilation, like `rollout.enforce_eager` of a training run."""
    seed: Kept[NonNegativeInt] = 0
    """Seed of the random prompts and of the order of the points."""
    start_timeout_s: Free[PositiveFloat] = 1800.0
    """Longest time for an engine to come up."""
    point_timeout_s: Free[PositiveFloat] = 600.0
    """Longest time for one point."""

    @property
    def run_dir(self) -> Path:
        return self.runs_dir / PROFILES_DIR / (self.name or self.model.resolve().name)

    @model_validator(mode="after")
    def _drafts(self) -> "ProfileConfig":
        if self.draft_models and not self.windows:
            raise ValueError("draft_models draft nothing without windows: give some")
        return self

    @model_validator(mode="after")
    def _ascending(self) -> "ProfileConfig":
        for name, values in (("tp_degrees", self.tp_degrees), ("windows", self.windows)):
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must ascend, each value once: {list(values)}")
        return self


class ProfileRun(Frozen):
    """A profile that is being made, as its tasks need to know it; all paths are absolute."""

    config: ProfileConfig
    max_context: PositiveInt
    """Longest sequence to measure, in tokens."""
    num_gpus: NonNegativeInt
    """GPUs of the cluster; 0 means that everything runs on CPUs."""
    anew: bool = False
    """An earlier profile is in use until this one is finished."""


class Measurement(Frozen):
    """One point to measure; a decode measurement gives the prefill point of its prompts too."""

    kind: Literal[PointKind.DECODE, PointKind.VERIFY, PointKind.DRAFT]
    tp_degree: PositiveInt
    batch: PositiveInt
    prompt_tokens: PositiveInt
    """Tokens of each sequence before the first measured step."""
    window: NonNegativeInt = 0
    """Draft tokens of each sequence: verify and draft."""
    drafter: str | None = None
    """Name of the drafter: draft."""


class MachineFacts(Frozen):
    """Machine and limits of an engine, as it tells them once it is up."""

    hardware: str
    max_active_tokens: PositiveInt
    """Tokens that its KV cache holds."""
    max_step_tokens: PositiveInt
    """Tokens that one of its steps handles; a larger batch is split."""
    versions: dict[str, str]


class ProfileReport(Frozen):
    """Result of a profile flow."""

    profile_file: Path
    profile: Profile
    held_out: tuple[Accuracy, ...]
    """Accuracy on points that were withheld within the curves."""
    between_batches: tuple[Accuracy, ...]
    """Accuracy on batch sizes that were withheld whole."""
