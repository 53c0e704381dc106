"""Settings of a run's inputs: model and data."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    JsonValue,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Tag,
    WithJsonSchema,
    model_validator,
)

from refrain.schemas.base import Frozen
from refrain.schemas.reward import RewardConfig


class ModelConfig(Frozen):
    """The policy to train."""

    path: Path
    """Hugging Face directory of a causal language model with its tokenizer, or its name on the Hub,
    for example `Qwen/Qwen3-1.7B`. A model from the Hub is downloaded once. On a cluster, set
    `HF_HOME` to a cache that all nodes see."""
    revision: str | None = None
    """Branch, tag or commit on the Hub, for example `v1.0`. Default: the main branch as it is at
    the download. Name a commit to repeat a run exactly."""
    trust_remote_code: bool = False
    """Run the Python code that comes with a model (`auto_map` in its config.json or
    tokenizer_config.json), in every process of the run. Applies to draft models too. Read the code
    before you switch this on. Off: a model that needs it is refused."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the rollout engines. The trainer's weights are float32 by default
    (`trainer.dtype`). Choose `float32` on a CPU, or to have fewer near-ties flip; it takes twice
    the memory."""
    head_dtype: Literal["model", "float32"] = "model"
    """Data type in which engines compute logits from the last hidden state. `float32` brings their
    log-probabilities closer to the trainer's and costs a little time and memory. Choose it if
    `mismatch/k1` is large."""


def _as_list(given: Any) -> Any:
    return (given,) if isinstance(given, str | Path | dict) else given


Files = Annotated[tuple[Path, ...], BeforeValidator(_as_list)]
"""Several files, or one."""
LocalTime = Annotated[datetime, AfterValidator(lambda time: time.replace(tzinfo=None))]
"""Local date and time; the time zone of the value is dropped."""
_Text = Annotated[str, Field(min_length=1, max_length=100)]
Texts = Annotated[tuple[_Text, ...], BeforeValidator(_as_list)]
"""Several texts of at most 100 characters, or one."""

Trackers = Annotated[
    tuple[Literal["mlflow", "wandb", "tensorboard", "trackio"], ...], BeforeValidator(_as_list)
]
"""Several trackers, or one."""


LOCALE = {"LANG": "C.UTF-8", "TZ": "UTC"}
"""Locale of scorers, so that no score depends on the machine."""


class DataSource(Frozen):
    """One source of a mixture of prompts."""

    name: str = Field(default="", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")
    """Name of the source in metrics, for example `math`. A mixture needs distinct names."""
    files: Files = Field(min_length=1)
    """Files with its prompts, for example `[data/math.parquet]`."""
    weight: PositiveFloat = 1.0
    """Share of the training prompts, relative to the other sources. For example, `3` beside a
    source of weight 1: three of four prompts. Raise it for a source to learn more from."""
    max_prompts: PositiveInt | None = None
    """Use only so many prompts, the first of its files. For example, `1000`. Set it if a source is
    larger than you need."""
    reward: RewardConfig | None = None
    """How its responses are scored, for example `{type: function, path: code.py}`. Default: the
    run's `reward`."""


def _kind(given: Any) -> str:
    return "source" if isinstance(given, dict | DataSource) else "file"


def _one_kind(given: tuple[Path | DataSource, ...]) -> tuple[Path | DataSource, ...]:
    if len({_kind(one) for one in given}) > 1:
        raise ValueError(
            "it lists files beside sources: write each file as a source, for example "
            "{name: math, files: math.parquet}"
        )
    names = [one.name for one in given if isinstance(one, DataSource)]
    if len(names) > 1 and ("" in names or len(set(names)) < len(names)):
        raise ValueError(
            f"its sources are named {', '.join(map(repr, names))}: give each another name, for "
            "example {name: math, files: math.parquet}"
        )
    return given


_FILE_OR_SOURCE = Annotated[
    Annotated[Path, Tag("file")] | Annotated[DataSource, Tag("source")], Discriminator(_kind)
]
_FORM = {"type": "array", "items": {"type": "string", "format": "path"}}
"""Schema for the form of Prefect's UI, which takes files. Mixtures come from a config file."""
Sources = Annotated[
    tuple[_FILE_OR_SOURCE, ...],
    BeforeValidator(_as_list),
    AfterValidator(_one_kind),
    WithJsonSchema(_FORM, mode="validation"),
]
"""Files, or the sources of a mixture."""


def sources_of(given: Sources) -> tuple[DataSource, ...]:
    """Return the sources of a mixture. A list of files is one source without a name."""
    files = tuple(one for one in given if isinstance(one, Path))
    named = tuple(one for one in given if isinstance(one, DataSource))
    return named or ((DataSource(files=files),) if files else ())


class CurriculumConfig(Frozen):
    """Skip prompts that are nearly always or nearly never solved, by their last pass rate.

    An epoch has as many steps as without. Prompts within the window take the places of those that
    are skipped.
    """

    min_pass_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Skip prompts with a pass rate of at most this. For example, `0.1`. Raise it if many groups
    have a single right response. 0 skips those that are never solved."""
    max_pass_rate: float = Field(default=1.0, gt=0.0, le=1.0)
    """Skip prompts with a pass rate of at least this. For example, `0.8`. Lower it to spend fewer
    responses on easy prompts. 1 skips those that are always solved."""
    skip_epochs: PositiveInt = 2
    """Epochs for which a prompt is skipped. Then a step draws it again. For example, `4`. Raise it
    if most prompts that come back are skipped again."""
    max_repeats: PositiveInt = 4
    """Times that an epoch draws a prompt within the window before it draws skipped ones. For
    example, `1`: never twice, so skipped prompts come last. Lower it if few prompts are left within
    the window and the policy overfits to them."""

    @model_validator(mode="after")
    def _has_window(self) -> "CurriculumConfig":
        if self.min_pass_rate >= self.max_pass_rate:
            raise ValueError(
                f"min_pass_rate ({self.min_pass_rate:g}) is not below max_pass_rate "
                f"({self.max_pass_rate:g}): no prompt would be within; lower the first or raise "
                "the second"
            )
        return self


class DataConfig(Frozen):
    """Data sets in veRL's format: Parquet, JSON or JSONL with `data_source`, `prompt`,
    `reward_model`."""

    train: Sources = Field(min_length=1)
    """Files with training prompts, for example `[data/train.parquet]`. To mix sources by weight,
    list them, for example `[{name: math, files: math.parquet, weight: 3}, {name: code, files:
    code.parquet}]`. A source has `name`, `files`, `weight`, `max_prompts` and `reward`."""
    validation: Sources = ()
    """Files with held-out prompts, for example `[data/test.parquet]`, or sources, if some have a
    `reward` of their own. Add them to see whether the policy learns more than its training prompts.
    Empty: no validation."""
    curriculum: CurriculumConfig | None = None
    """Skips prompts by their pass rates, for example `{max_pass_rate: 0.9}`. Default: every epoch
    draws every prompt."""
    pass_score: NonNegativeFloat = 1.0
    """Least score of a response that passes, for `curriculum` and the pass rates of sources. For
    example, `0.5`. Change it if your scorer gives other scores than 0 and 1."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt in tokens, including the chat template, for example `2048`. Raise it if the
    run refuses your prompts as too long. See `overlong` for longer ones."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """Action for a prompt that is too long. `refuse`: the run does not start, and the error names
    file and row. `drop`: the prompt is left out. Choose `drop` if you can do without the longest
    prompts."""
    system_prompt: str | None = None
    """System message, put before the messages of each row that has none of its own, for example
    `Answer in one line`. Set it if the data lacks instructions that your scorer relies on."""
    template_arguments: dict[str, JsonValue] = {}
    """Arguments for the model's chat template, for example `{enable_thinking: false}` for Qwen3.
    Set them if the template has switches."""
    date: LocalTime | None = None
    """Date and time that the chat template uses as the current time (`strftime_now`), for example
    `2026-11-26` or `2026-11-26 09:30`. Scorers find it in `REFRAIN_DATE`. Set it to repeat a run's
    prompts on another day. Default: the start of the run; a resumed run keeps it."""
    max_response_tokens: PositiveInt = 8192
    """Longest response in tokens, for example `4096`. A longer one is cut, with finish reason
    `length`. Raise it if many are cut (`response_length/clip_ratio`). Lower it if memory is
    short."""
    shuffle: bool = True
    """Shuffle the prompts anew in every epoch, by the run's seed. Switch it off to keep the order
    of the files, for example from easy to hard."""

    @property
    def train_files(self) -> tuple[Path, ...]:
        return _files_of(self.train)

    @property
    def validation_files(self) -> tuple[Path, ...]:
        return _files_of(self.validation)

    @property
    def own_rewards(self) -> dict[str, RewardConfig]:
        """Rewards of sources that have one of their own, by source."""
        sources = (*sources_of(self.train), *sources_of(self.validation))
        return {source.name: source.reward for source in sources if source.reward}

    @model_validator(mode="after")
    def _consistent_sources(self) -> "DataConfig":
        held_out = sources_of(self.validation)
        if weighted := next((one for one in held_out if one.weight != 1.0), None):
            raise ValueError(
                f"source {weighted.name!r} of data.validation has a weight, but a validation takes "
                "each prompt once: remove it, or set max_prompts"
            )
        rewards = {source.name: source.reward for source in sources_of(self.train)}
        for source in held_out:
            if rewards.get(source.name, source.reward) != source.reward:
                raise ValueError(
                    f"source {source.name!r} has another reward in data.train than in "
                    "data.validation: give both the same, or the sources distinct names"
                )
        return self

    @property
    def surroundings(self) -> dict[str, str] | None:
        """Environment variables that scorers see instead of their machine's. None: not known
        yet."""
        return {**LOCALE, "REFRAIN_DATE": self.date.isoformat()} if self.date else None


def _files_of(given: Sources) -> tuple[Path, ...]:
    return tuple(file for source in sources_of(given) for file in source.files)
