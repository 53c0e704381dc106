"""Settings of sampling from the policy."""

from pydantic import Field

from refrain.schemas.base import Frozen, UnitInterval


class SamplingConfig(Frozen):
    """Temperature of a distribution, and the part of it that tokens are drawn from."""

    temperature: float = Field(default=1.0, ge=0.0)
    """The logits are divided by this before sampling, for example `0.6`. 0 takes the most likely
    token. Set it to the value that you will serve with."""
    top_p: UnitInterval = 1.0
    """Nucleus sampling: draw from the likeliest tokens that have this share of the probability, for
    example `0.95`. Set it to the value that you will serve with."""
    top_k: int = Field(default=0, ge=0)
    """Draw from this many of the most likely tokens, for example `20`. Set it to the value that you
    will serve with. 0 draws from all."""
