"""Long canaries, made beside the short ones of every sync. They find faults that appear only in
long contexts or next to other samples.

    long      longer than the windows, chunks and rope switches that the model's configuration names
    behind    a short sequence that lies behind a long sample in the trainer's row

They cost a forward pass of a long sample in float32 and one in the engines' data type. The trainer
makes them when it starts. It makes new ones after it has trained on `TRAINED_TOKENS` times as many
tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refrain.engines.learn.rollouts import MAX_CANARY_TOKENS, ScoredRollout

NUM_SHORT = 4
"""Number of prompts that a trainer's first short canaries are made of."""
NUM_PROMPTS = 256
"""Number of prompts that a trainer's first long canary is made of."""
LONG_TOKENS = 4096
"""Smallest context of the long canary, unless `max_model_len` is smaller."""
BEYOND_TOKENS = 256
"""Tokens of the long canary beyond the longest window, chunk or rope switch."""
TRAINED_TOKENS = 256
"""Tokens to train on for each token of a long canary, before the next one is made."""
_LENGTHS = ("window", "chunk", "block", "original_max_position")
"""Parts of setting names in a model's configuration. Attention or positions change beyond the
values of these settings."""


class LongCanaries:
    """Tokens of long canaries, and when they are due. Every rank decides the same."""

    def __init__(self, model: Mapping[str, Any], max_model_len: int) -> None:
        """`model`: a configuration, as transformers' `to_dict` returns it."""
        needed = max([LONG_TOKENS, *_lengths(model)]) + BEYOND_TOKENS
        self.num_tokens = min(needed, max_model_len - 1)
        """Tokens of the long canary. Leaves room for the token that an engine generates."""
        self._left = 0
        """Tokens to train on before the next canaries are due."""
        self._text: NDArray[np.int32] | None = None

    def train_on(self, rollouts: Sequence[ScoredRollout]) -> None:
        """Count the trained tokens, and make the next canaries of these rollouts."""
        self._left -= sum(len(rollout.token_ids) for rollout in rollouts)
        firsts = {rollout.prompt_key: rollout for rollout in rollouts}
        self._text = self._joined([one.token_ids for one in firsts.values()])

    def take(self, token_ids: Sequence[Sequence[int]] | None = None) -> list[NDArray[np.int32]]:
        """Return the long canary and the short one to lie behind it, or nothing if they are not
        due. They are made of these sequences, or by default of the last rollouts."""
        text = self._joined(token_ids) if token_ids else self._text
        if self._left > 0 or text is None or self.num_tokens < 2:
            return []
        self._left = TRAINED_TOKENS * self.num_tokens
        return [text, text[-min(MAX_CANARY_TOKENS, len(text)) :]]

    def _joined(self, sequences: Sequence[Sequence[int] | NDArray]) -> NDArray[np.int32]:
        """Join the sequences into one text of `num_tokens` tokens. If it is too short, add its
        tokens in random orders: plain copies would be easy to predict from the copy before, within
        any window."""
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
