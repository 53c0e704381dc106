"""Drawing of tokens from the policy's distribution."""

from pydantic import Field

from schemas.base import Frozen, UnitInterval


class SamplingConfig(Frozen):
    """A distribution's temperature, and how much of it is drawn from."""

    temperature: float = Field(default=1.0, ge=0.0)
    """Divisor of the logits before sampling; 0 takes the likeliest token."""
    top_p: UnitInterval = 1.0
    """Nucleus mass kept before sampling."""
    top_k: int = Field(default=0, ge=0)
    """Tokens kept before sampling; 0 keeps all."""
