"""Describe which request, position and draft each row of a step's logits belongs to."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

REJECTED = -1
"""Placeholder for a token that is not emitted, as in vLLM."""
GREEDY_BELOW = 1e-5
"""Lower temperatures count as 0, as in vLLM."""


class LogitColumns(NamedTuple):
    """Tokens that logits are of, if not of all."""

    token_ids: Tensor
    """int64 [columns]: ascending."""
    vocab_size: int
    """Of all tokens."""


@dataclass(frozen=True)
class StepRows:
    """Rows of a step. Each request has one row, plus one for each draft token.

    The arrays are those that vLLM keeps on the device.
    """

    positions: Tensor
    """int64 [tokens of the step]: position of each token."""
    input_rows: Tensor
    """int32 or int64 [rows]: index of the token whose logits a row holds, plus `after`."""
    after: int
    """0 or 1: the offset in `input_rows`."""
    keys: Tensor
    """int64 [requests]: sample keys."""
    temperatures: Tensor | None
    """float32 [requests]; None if every request is greedy."""
    ends: Tensor | None = None
    """int32 [requests]: number of rows up to and with each request; None without drafts."""
    drafts: Tensor | None = None
    """int32 [rows]: the draft token that each row continues, so a row verifies that of the next
    row. The first row of a request has none, and its value here has no effect."""
    width: int = 1
    """Largest number of rows of a request."""
    columns: LogitColumns | None = None
    """Tokens of the logits' columns; None if they are of all tokens. Only for `Foresee`."""


Foresee = Callable[[Tensor, StepRows], Tensor]
"""Function that returns the token that each row draws, int32 [rows]. It takes the logits to draw
from, float [rows, columns], and rows without drafts."""
Sample = Callable[[Tensor, Tensor, StepRows], tuple[Tensor, Tensor]]
"""Function that draws the tokens of a step.

Without drafts it draws one token per request. With drafts it draws tokens up to the first one that
differs from its draft; that token replaces the draft.

It takes logits, float [rows, vocab], and the logits to draw from: the same tensor, or a copy with
-inf for truncated tokens. It returns tokens, int32 [requests, width], with `REJECTED` after the
emitted ones, and their log-probabilities, float32 of the same shape. These are of
softmax(logits / T), or of softmax(logits) at temperature 0.
"""
