"""Drafts a request from its own text, prompt and response: prompt lookup. Pure.

What came after the last place at which the text reads as its end does now; the longest match wins,
and of equally long ones the most recent. vLLM 0.32's own proposer takes the earliest of them, from
which more tokens follow: where a text repeats itself at once, ours drafts one period and no more.
But a text resembles what it said last: of windows of four, on responses of the demo's model and at
least two tokens that match, 10.0 % are accepted of the most recent match, 7.3 % of the earliest.

The work is `SiblingIndex`'s, with each request a group of its own, from its prompt's first token.
A step costs 1.3 us a row whatever the context (256 rows of 4096 tokens: 0.3 ms), where looking
through the text takes 1 to 2 ns a token (1.1 to 2.2 ms). A text that joins late costs 0.1 us a
token once, and 36 to 72 bytes a token while it runs.
"""

from itertools import count

import numpy as np

from engines.histospec.siblings import SiblingIndex


class NgramDrafter:
    """N-gram drafter of one engine."""

    def __init__(self, *, min_match: int = 2, max_match: int = 7) -> None:
        """Nothing is drafted from less than `min_match` tokens, or told apart by more than
        `max_match`."""
        self.index = SiblingIndex(max_match=max_match, min_match=min_match)
        self._names = map(str, count())

    def add(self) -> int:
        """The slot of a request that begins here, with whatever text, until it is removed."""
        group = next(self._names)
        slot = self.index.add(group, num_prompt_tokens=0)
        # The text goes with its only request.
        self.index.forget(group)
        return slot

    def propose(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        windows: np.ndarray,
        drafts: np.ndarray,
    ) -> np.ndarray:
        """Take in what is new, and draft for every row, as `SiblingIndex.draft` has it. Tokens are
        verified, and never fewer than before."""
        self.index.extend(slots, token_ids, num_tokens)
        return self.index.draft(slots, token_ids, num_tokens, windows, drafts)
