"""Drafters that need only the text of a request: its prompt and its response so far. Pure."""

from collections.abc import Callable
from typing import Protocol

import numpy as np

from refrain.engines.specactor.ngram import NgramDrafter
from refrain.schemas.drafting import NGRAM


class TextDrafter(Protocol):
    """Drafter of all requests of one engine that name it in their draft setting."""

    def add(self) -> int:
        """Return the slot of a new request, which may already have text. It is valid until
        `remove`."""
        ...

    def remove(self, slot: int) -> None:
        """Forget a request."""
        ...

    def propose(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        windows: np.ndarray,
        drafts: np.ndarray,
    ) -> np.ndarray:
        """Write the draft of each row into `drafts`. Return int32 [rows], the tokens drafted.

        `slots`: int32 [rows].
        `token_ids`: int32 [rows, any], the text; its tokens are verified, and never fewer than
        before.
        `num_tokens`: int32 [rows], how many of `token_ids` are valid.
        `windows`: int32 [rows], most tokens to draft.
        `drafts`: int32 [rows, at least the largest window].
        """
        ...


TEXT_DRAFTERS: dict[str, Callable[[], TextDrafter]] = {
    NGRAM: NgramDrafter,
}
"""The drafters of `schemas.drafting.TEXT_DRAFTERS`."""
