"""Drafts a request from its own prompt and response: prompt lookup. Pure.

The drafter looks for an earlier place with the same tokens as the text's end, and drafts the tokens
that followed it. The longest match wins, then the most recent. vLLM 0.32's own proposer takes the
earliest match instead, which has more tokens after it: if a text repeats itself at once, ours
drafts one period only. But a text resembles its recent part more. Measured with windows of four and
at least two matching tokens, on responses of the demo's model: 10.0 % of drafts are accepted from
the most recent match, 7.3 % from the earliest.

`SiblingIndex` does the work. Each request is a group of its own, from its prompt's first token. A
step costs 1.3 us a row whatever the context (256 rows of 4096 tokens: 0.3 ms). Scanning the text
takes 1 to 2 ns a token (1.1 to 2.2 ms). A text that joins late costs 0.1 us a token once, and 36 to
72 bytes a token while it runs.
"""

from itertools import count

import numpy as np

from refrain.engines.histospec.siblings import SiblingIndex


class NgramDrafter:
    """N-gram drafter of one engine."""

    def __init__(self, *, min_match: int = 2, max_match: int = 7) -> None:
        """Draft only from matches of at least `min_match` tokens. Compare at most `max_match`."""
        self.index = SiblingIndex(max_match=max_match, min_match=min_match)
        self._names = map(str, count())

    def add(self) -> int:
        """Return the slot of a new request, which may already have text, until it is removed."""
        group = next(self._names)
        slot = self.index.add(group, num_prompt_tokens=0)
        # The group has a single request, so its text goes when that request goes.
        self.index.forget(group)
        return slot

    def remove(self, slot: int) -> None:
        self.index.remove(slot)

    def propose(
        self,
        slots: np.ndarray,
        token_ids: np.ndarray,
        num_tokens: np.ndarray,
        windows: np.ndarray,
        drafts: np.ndarray,
    ) -> np.ndarray:
        """Add new tokens and draft for every row, as `SiblingIndex.draft` does.

        Tokens must be verified, and never fewer than before.
        """
        self.index.extend(slots, token_ids, num_tokens)
        return self.index.draft(slots, token_ids, num_tokens, windows, drafts)
