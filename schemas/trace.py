"""A trace describes a run's rollouts without the run: a Parquet file with one row per rollout.

Its columns are the fields of `TraceRow`, under the same names. Optional columns may be missing, and
other columns are ignored. The key of a row is (step, prompt_key, sample_index).
"""

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from refrain.schemas.base import Frozen
from refrain.schemas.rollout import Turn


class TraceRow(Frozen):
    """One rollout of a trace."""

    step: NonNegativeInt
    """RL step. Steps count from 1 and may have gaps; 0 is a validation before the first step."""
    epoch: NonNegativeInt
    """Pass over the data that the step belongs to, from 0."""
    prompt_key: str = Field(min_length=1)
    """Name of the prompt, the same in every epoch. The samples of one prompt are a group."""
    sample_index: NonNegativeInt
    """Index of the sample in its group."""
    prompt_tokens: PositiveInt
    response_tokens: PositiveInt
    """Generated tokens, including the one that ended the response. Those that an environment gave
    do not count."""
    acceptance: float | None = Field(default=None, ge=0.0, le=1.0)
    """Accepted / drafted tokens of this rollout. None without drafts."""
    reward: FiniteFloat | None = None
    """Reward of the response. None if it was never scored."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Exactly `prompt_tokens` ids. None if the trace has only lengths."""
    response_token_ids: tuple[int, ...] | None = None
    """Exactly `response_tokens` ids, with those that the environment gave between the turns. None
    if the trace has only lengths."""
    turns: tuple[Turn, ...] | None = None
    """Turns of a conversation, in order: `num_sampled`, `num_observed` (null in the last) and
    `waited_s`. They have all of its `response_tokens`. None without an environment."""


REQUIRED = tuple(name for name, field in TraceRow.model_fields.items() if field.is_required())
"""Columns that every trace has."""
