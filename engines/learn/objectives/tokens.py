"""What a policy loss gets and returns: values per sampled token, sample after sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from refrain.schemas.algorithm import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Tokens of a micro-batch."""

    logprobs: Float[Tensor, "tokens"]
    """log pi, with its gradient. 0 where tokens do not count."""
    log_ratios: Float[Tensor, "tokens"]
    """log pi - log pi_old, with its gradient. 0 where tokens do not count."""
    advantages: Float[Tensor, "tokens"]
    counted: Bool[Tensor, "tokens"]
    """Whether a token counts in the loss."""
    num_tokens: Sequence[int]
    """Tokens of each sample. A sample is never cut."""


@dataclass(frozen=True, slots=True)
class PolicyLosses:
    """Losses of a micro-batch's tokens, before weights and aggregation."""

    losses: Float[Tensor, "tokens"]
    log_ratios: Float[Tensor, "tokens"]
    """Logarithms of the ratios that the objective bounds."""
    low: Bool[Tensor, "tokens"]
    """Counted tokens of negative advantage that its lower bound acts on."""
    high: Bool[Tensor, "tokens"]
    """Counted tokens of positive advantage that its upper bound acts on."""


Objective = Callable[[PolicyTokens, AlgorithmConfig], PolicyLosses]
