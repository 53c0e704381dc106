"""Rows of a step's logits: whose they are, in the arrays that vLLM has of them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

REJECTED = -1
"""Placeholder of a token that was not emitted; vLLM's own."""
GREEDY_BELOW = 1e-5
"""Temperatures below are 0; vLLM's own."""


@dataclass(frozen=True)
class StepRows:
    """Requests of a step have one row each, or with drafts one more than they have drafts."""

    positions: Tensor
    """int64 [tokens of the step]: the position of each."""
    input_rows: Tensor
    """int32 or int64 [rows]: which of these tokens a row of logits comes from, plus `after`."""
    after: int
    keys: Tensor
    """int64 [requests]: sample keys."""
    temperatures: Tensor | None
    """float32 [requests]; None when every request is greedy."""
    ends: Tensor | None = None
    """int32 [requests]: rows of a request and those before it; None without drafts."""
    drafts: Tensor | None = None
    """int32 [drafts], of one request after the other."""
    width: int = 1
    """Rows of the request with the most."""


Sample = Callable[[Tensor, Tensor, StepRows], tuple[Tensor, Tensor]]
"""Draws the tokens of a step: of each request one, or with drafts all up to the first that is not
its draft, and stands in its place.

Takes logits, float [rows, vocab], and what is drawn from: the same, or a copy with -inf where it
was truncated. Returns tokens, int32 [requests, width], with `REJECTED` behind those that are
emitted, and log-probabilities, float32 of the same shape, of softmax(logits / T) (temperature 0: of
softmax(logits)).
"""
