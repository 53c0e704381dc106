"""Settings of a run's inputs: model and data."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, PositiveInt

from refrain.schemas.base import Frozen


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
    return (given,) if isinstance(given, str | Path) else given


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


class DataConfig(Frozen):
    """Data sets in veRL's format: Parquet, JSON or JSONL with `data_source`, `prompt`,
    `reward_model`."""

    train: Files = Field(min_length=1)
    """Files with training prompts, for example `[data/train.parquet]`."""
    validation: Files = ()
    """Files with held-out prompts, for example `[data/test.parquet]`. Add them to see whether the
    policy learns more than its training prompts. Empty: no validation."""
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
    def surroundings(self) -> dict[str, str] | None:
        """Environment variables that scorers see instead of their machine's. None: not known
        yet."""
        return {**LOCALE, "REFRAIN_DATE": self.date.isoformat()} if self.date else None
