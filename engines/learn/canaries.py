"""Canaries beside the short ones of every sync: for faults that only long contexts or neighbours
show.

    long      longer than the windows, chunks and rope switches that the model's configuration names
    behind    a short one that lies behind a long sample in the trainer's row

They cost a forward pass of a long sample in float32 and one in the engines' data type. The trainer
makes them when it starts, and again when it has trained on `TRAINED_TOKENS` times as many tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.learn.rollouts import MAX_CANARY_TOKENS, ScoredRollout

NUM_SHORT = 4
"""Prompts that a trainer's first short canaries are."""
NUM_PROMPTS = 256
"""Prompts that its first long one is made of."""
LONG_TOKENS = 4096
"""Context of the long canary, at least, where samples may be so long."""
BEYOND_TOKENS = 256
"""Tokens of the long canary beyond the longest window, chunk or rope switch."""
TRAINED_TOKENS = 256
"""Tokens that are trained on for each token of a long canary, at least."""
_LENGTHS = ("window", "chunk", "block", "original_max_position")
"""Parts of the names of settings, in a model's configuration, beyond whose value attention or
positions are others."""


class LongCanaries:
    """The tokens of long canaries, and when they are due. Every rank decides alike."""

    def __init__(self, model: Mapping[str, Any], max_model_len: int) -> None:
        """`model`: a configuration as transformers' `to_dict` gives it."""
        needed = max([LONG_TOKENS, *_lengths(model)]) + BEYOND_TOKENS
        self.num_tokens = min(needed, max_model_len - 1)
        """Tokens of the long one: an engine generates one more."""
        self._left = 0
        """Tokens to train on before the next ones are due."""
        self._text: NDArray[np.int32] | None = None

    def train_on(self, rollouts: Sequence[ScoredRollout]) -> None:
        """Count what is trained on; the next canaries are of these rollouts."""
        self._left -= sum(len(rollout.token_ids) for rollout in rollouts)
        firsts = {rollout.prompt_key: rollout for rollout in rollouts}
        self._text = self._joined([one.token_ids for one in firsts.values()])

    def take(self, token_ids: Sequence[Sequence[int]] | None = None) -> list[NDArray[np.int32]]:
        """Return the long canary and the one to lie behind it, of these sequences or of the last
        rollouts; nothing where they are not due."""
        text = self._joined(token_ids) if token_ids else self._text
        if self._left > 0 or text is None or self.num_tokens < 2:
            return []
        self._left = TRAINED_TOKENS * self.num_tokens
        return [text, text[-min(MAX_CANARY_TOKENS, len(text)) :]]

    def _joined(self, sequences: Sequence[Sequence[int] | NDArray]) -> NDArray[np.int32]:
        """One text of them; where it is too short its tokens go on in random orders, as copies
        would be predicted from the copy before, however far a window reaches."""
        text = np.concatenate([np.asarray(one, np.int32) for one in sequences])
        random, parts = np.random.default_rng(0), [text]
        while sum(map(len, parts)) < self.num_tokens:
            parts.append(random.permutation(text))
        return np.concatenate(parts)[: self.num_tokens]


def _lengths(model: Mapping[str, Any]) -> Iterator[int]:
    for name, value in model.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif any(part in str(name) for part in _LENGTHS):
            values = value if isinstance(value, list | tuple) else [value]
            yield from (one for one in values if type(one) is int)
