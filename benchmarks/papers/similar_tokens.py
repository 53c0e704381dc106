"""Tokens that resemble those of the epoch before as much as RhymeRL prints (5.1, 6a).

    path:      p0   p1   p2   p3   p4   ...     phrases from a book: how a prompt is answered
    response:  p0   p1   a    p3   p4   ...     at some places (forks) another phrase, and back

At a fork a response takes the path's phrase or another one of the fork. Anywhere it may take a new
phrase. Both epochs follow the same path, which continues where responses have become longer.
Phrases are drawn by Zipf's law, so that short matches are ambiguous, as in language.

Calibrated: forks and new phrases, so that the paper's routine finds 93 % of the tokens (5.1: "for
math tasks, 93 %") and 65 to 79 % of its drafts are right (7.2.2). Assumed: the book, one path, and
that every second response is rewarded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refrain.engines.histospec.library import PromptHistory


@dataclass(frozen=True)
class Resemblance:
    """How a prompt's responses are made."""

    fork_share: float = 0.33
    """Share of the phrases in whose place another may be."""
    other_share: float = 0.5
    """Share of the responses that take another one there."""
    new_share: float = 0.01
    """Share of the phrases that are new."""
    num_phrases: int = 4096
    phrase_tokens: int = 4
    """Longest; lengths are even from 1."""
    vocabulary: int = 32000


@dataclass(frozen=True)
class _Book:
    """Phrases, and how they are drawn."""

    tokens: np.ndarray
    """int32 [phrases, longest]"""
    lengths: np.ndarray
    cumulative: np.ndarray
    """float64 [phrases]: probabilities by Zipf's law, added up."""

    @classmethod
    def draw(cls, spec: Resemblance, rng: np.random.Generator) -> "_Book":
        shape = spec.num_phrases, spec.phrase_tokens
        weights = 1.0 / np.arange(1, spec.num_phrases + 1)
        return cls(
            rng.integers(0, spec.vocabulary, shape, np.int32),
            rng.integers(1, spec.phrase_tokens, spec.num_phrases, endpoint=True),
            np.cumsum(weights / weights.sum()),
        )

    def phrases(self, rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
        """Phrases by their numbers."""
        found = np.searchsorted(self.cumulative, rng.random(shape))
        return np.minimum(found, len(self.cumulative) - 1)

    def text(self, phrases: np.ndarray) -> np.ndarray:
        """int32 [tokens]"""
        longest = np.arange(self.tokens.shape[1])
        return self.tokens[phrases][longest < self.lengths[phrases][:, None]]


def similar_groups(
    spec: Resemblance, lengths: Sequence[tuple[Sequence[int], Sequence[int]]], seed: int
) -> list[tuple[PromptHistory, PromptHistory]]:
    """Groups of two epochs for each prompt; `lengths`: response tokens of the one and the other."""
    rng = np.random.default_rng([seed, 5])
    book = _Book.draw(spec, rng)
    found = []
    for number, of_epochs in enumerate(lengths):
        num_tokens = max(max(own) for own in of_epochs)
        # Every phrase has a token: so many are enough.
        options = book.phrases(rng, (num_tokens, 2))
        forks = rng.random(num_tokens) < spec.fork_share
        prompt = rng.integers(0, spec.vocabulary, 16, np.int32)
        earlier, later = (
            PromptHistory(
                str(number),
                step,
                prompt,
                [_response(spec, book, options, forks, num, rng) for num in own],
                rng.integers(0, 1, len(own), endpoint=True).astype(float).tolist(),
            )
            for step, own in enumerate(of_epochs)
        )
        found.append((earlier, later))
    return found


def _response(
    spec: Resemblance,
    book: _Book,
    options: np.ndarray,
    forks: np.ndarray,
    num_tokens: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """int32 [num_tokens]. `options`: int [places, 2], phrases of the path and others; `forks`: bool
    [places]."""
    others = forks[:num_tokens] & (rng.random(num_tokens) < spec.other_share)
    known = options[np.arange(num_tokens), others.astype(int)]
    new = rng.random(num_tokens) < spec.new_share
    return book.text(np.where(new, book.phrases(rng, num_tokens), known))[:num_tokens]
