"""A trace: what a run's rollouts were like, without the run. One Parquet row per rollout.

The columns of the Parquet file are the fields of `TraceRow`, under the same names; optional ones
may be missing from a file, and columns not named here are ignored. A row is found by (step,
prompt_key, sample_index), which no two rows share.
"""

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from schemas.base import Frozen


class TraceRow(Frozen):
    """One rollout of a trace."""

    step: NonNegativeInt
    """RL step; steps count from 1 (0 is a validation before the first) and may have gaps."""
    epoch: NonNegativeInt
    """Pass over the data to which the step belongs, from 0."""
    prompt_key: str = Field(min_length=1)
    """Names the prompt, the same in every epoch; the samples of one prompt are a group."""
    sample_index: NonNegativeInt
    """Index of the sample in its group."""
    prompt_tokens: PositiveInt
    response_tokens: PositiveInt
    """Generated tokens, the one that ended the response included."""
    acceptance: float | None = Field(default=None, ge=0.0, le=1.0)
    """Accepted over drafted tokens of this rollout; None when nothing was drafted."""
    reward: FiniteFloat | None = None
    """Reward of the response; None when it was never scored."""
    prompt_token_ids: tuple[int, ...] | None = None
    """Exactly `prompt_tokens` of them; None when the trace holds lengths alone."""
    response_token_ids: tuple[int, ...] | None = None
    """Exactly `response_tokens` of them; None when the trace holds lengths alone."""


REQUIRED = tuple(name for name, field in TraceRow.model_fields.items() if field.is_required())
"""Columns that every trace has."""
