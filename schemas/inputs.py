"""Settings of what a run begins with: a model and data."""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, PositiveInt

from schemas.base import Frozen


class ModelConfig(Frozen):
    """The policy to train."""

    path: Path
    """Hugging Face directory of a causal language model with its tokenizer, or its name on the Hub
    (`Qwen/Qwen3-1.7B`), from where it is downloaded once; on a cluster into a cache (`HF_HOME`)
    that all nodes see."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Default: its main branch, whatever that is by then."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, of `auto_map` in its config.json or
    tokenizer_config.json, in every process of the run; for the draft models too. Off: a model that
    needs it is refused. Read the code before you set it."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the rollout engines. The trainer keeps float32 master weights."""
    head_dtype: Literal["model", "float32"] = "model"
    """Data type in which engines compute logits from the last hidden state. `float32` brings their
    log-probabilities nearer to the trainer's, for a little time and memory."""


def _as_list(given: Any) -> Any:
    return (given,) if isinstance(given, str | Path) else given


Files = Annotated[tuple[Path, ...], BeforeValidator(_as_list)]
"""Some files, or one."""
LocalTime = Annotated[datetime, AfterValidator(lambda time: time.replace(tzinfo=None))]
"""Date and time as a clock on the wall shows them, whatever zone they are given in."""
_Text = Annotated[str, Field(min_length=1, max_length=100)]
Texts = Annotated[tuple[_Text, ...], BeforeValidator(_as_list)]
"""Some texts of at most 100 characters, or one."""


class DataConfig(Frozen):
    """veRL-style data sets: Parquet, JSON or JSONL with `data_source`, `prompt`, `reward_model`."""

    train: Files = Field(min_length=1)
    """Files with training prompts."""
    validation: Files = ()
    """Files with held-out prompts; none switches validation off."""
    max_prompt_tokens: PositiveInt = 1024
    """Tokens of a prompt, those of its chat template included."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """A longer prompt is refused, named by file and row, or left out."""
    max_samples: PositiveInt | None = None
    """Training prompts that are used, from the first row on. Default: all."""
    system_prompt: str | None = None
    """Message of the role `system` before those of each row that has none."""
    template_arguments: dict[str, JsonValue] = {}
    """Arguments of the model's chat template, such as `enable_thinking: false` for Qwen3."""
    date: LocalTime | None = None
    """Date and time that the chat template takes for now (`strftime_now`), for example `2026-11-26`
    or `2026-11-26 09:30`. Scorers find it in `REFRAIN_DATE`. Default: the start of the run, which
    keeps it."""
    locale: dict[str, str] | None = None
    """Environment variables `LANG`, `LANGUAGE`, `LC_*` and `TZ` of scorers, for example
    `{TZ: Europe/Berlin}`. Default: those that the run starts with, which keeps them."""
    max_response_tokens: PositiveInt = 8192
    """A response is cut here, with finish reason `length`."""
    shuffle: bool = True
    """A new order every epoch, drawn from the run's seed."""

    @property
    def surroundings(self) -> dict[str, str] | None:
        """Environment variables that scorers see in the place of their machine's own; None: not
        yet known."""
        if self.date is None or self.locale is None:
            return None
        return {**self.locale, "REFRAIN_DATE": self.date.isoformat()}
