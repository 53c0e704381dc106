"""Index of the responses of one prompt's last rollouts, ready to draft from (RhymeRL 5.3).

    text:   prompt's tail, response 0, end | prompt's tail, response 1, end | ...
    later turns of a conversation:           tail of what was before, turn, end | ...
    order:  positions of the text, sorted by the tokens that follow
    weight: prefix sums over `order` of the reward of the response that each position is in

A match of the last tokens is an interval of `order`, and so is each suffix-tree node below it. One
subtraction gives a node's sum of rewards. The greedy descent by the largest sum of rewards ends at
one suffix, so a draft is a contiguous slice of the text. The index takes 16 bytes a token.

Each turn of a conversation is a part of its own. The tail before a later turn is stored as negative
numbers (`as_context`). A match finds them if the row has them before its own turn, but they are
never drafted. So a turn begins with drafts for its observation, and no observed token is drafted.

Deviations from the paper:
- A suffix array replaces the suffix tree: it has the same nodes in a twentieth of the memory.
- Rewards are fixed-point numbers (`RESOLUTION`), so sums are exact in any order. Negative rewards
  shift all of them up by the minimum, so that a node never loses by having more responses.
- Ties go to the child with more occurrences, then to the smaller token. So when all rewards are
  equal, the most frequent continuation is drafted.
- The end of a response is no child. It yields no token, and the descent goes on with the other
  children.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESOLUTION = 2.0**-20
"""Smallest difference between rewards. A sum over 2**20 suffixes does not overflow for rewards up
to 2**22."""
END = -1
"""Separator in the text, after each response and after each turn of a conversation."""
_MAX_WEIGHT = 2.0**42

Tokens = Sequence[int] | np.ndarray
Turns = Sequence[tuple[int, int]]
"""Sampled and observed tokens of each turn of a response. Empty: all its tokens are sampled."""


@dataclass(frozen=True, eq=False, slots=True)
class HistoryIndex:
    """Flat, immutable index. `build_index` makes it, or `open_index` maps it from a file."""

    text: np.ndarray
    """int32 [n]: tokens, and `END` after each part: a response, or a turn of a conversation."""
    order: np.ndarray
    """int32 [n]: start of each suffix of the text, in sorted order."""
    weight: np.ndarray
    """int64 [n + 1]: weight[j] - weight[i] is the sum over order[i:j]."""
    first_tokens: np.ndarray
    """int32 [distinct tokens], ascending. Empty if `first_starts` covers every number instead."""
    first_starts: np.ndarray
    """int32 [distinct tokens + 1]: where in `order` the suffixes with each first token start. If
    `first_tokens` is empty, there is one entry for each number from `END` on."""
    sieve: np.ndarray
    """int64 [any]: Bloom filter of the runs of `min_match` tokens (`histospec.bloom_filter`)."""
    min_match: int
    max_match: int
    max_draft: int
    step: int = 0
    """RL step that generated the responses."""

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        firsts = (self.first_tokens, self.first_starts)
        return (self.text, self.order, self.weight, *firsts, self.sieve)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def part_weights(self) -> np.ndarray:
        """Weight of each part; int64 [parts]."""
        weights = np.empty(len(self.text), np.int64)
        weights[self.order] = np.diff(self.weight)
        return weights[self.text == END]


def build_index(
    prompt_token_ids: Tokens,
    responses: Sequence[Tokens],
    rewards: Sequence[float],
    *,
    turns: Sequence[Turns] = (),
    min_match: int = 3,
    max_match: int = 7,
    max_draft: int = 32,
    step: int = 0,
) -> HistoryIndex:
    """Index all responses of one prompt.

    Args:
        prompt_token_ids: the last `max_match` of them begin each part of the text, so that the
            first token of a response can be drafted.
        responses: token ids, none negative.
        rewards: one per response, finite.
        turns: those of each response. Empty: no response has turns.
        min_match, max_match: least and largest number of matching tokens (the paper: 3 and 7).
        max_draft: longest draft (the paper: 32).
        step: RL step that generated the responses.
    """
    assert len(responses) == len(rewards)
    turns = turns or [()] * len(responses)
    texts = [
        response_text(prompt_token_ids, response, own, max_match)
        for response, own in zip(responses, turns, strict=True)
    ]
    return index_text(
        np.concatenate([np.empty(0, np.int32), *texts]),
        np.repeat(response_weights(rewards), list(map(num_parts, turns))),
        min_match=min_match,
        max_match=max_match,
        max_draft=max_draft,
        step=step,
    )


def index_text(
    text: np.ndarray,
    part_weights: np.ndarray,
    *,
    min_match: int,
    max_match: int,
    max_draft: int,
    step: int,
) -> HistoryIndex:
    """Index a text in the form of `HistoryIndex.text`. `part_weights`: int64, weight of each
    part."""
    from refrain.engines.histospec.bloom_filter import build_filter
    from refrain.engines.histospec.suffixes import sort_suffixes

    assert 1 <= min_match <= max_match
    assert max_draft >= 1
    ends = np.flatnonzero(text == END)
    assert len(ends) == len(part_weights), "a token id is negative"
    first_tokens, inverse = np.unique(text, return_inverse=True)
    # The order of what follows an end has no meaning, and drafts never look there.
    order = sort_suffixes(inverse.astype(np.int32), len(first_tokens), max_match + max_draft)
    weights = np.repeat(part_weights, np.diff(ends, prepend=-1))
    first_tokens, firsts = _directory(first_tokens)
    first_starts = np.searchsorted(text[order], firsts)
    return HistoryIndex(
        text=text,
        order=order,
        weight=np.concatenate([[0], np.cumsum(weights[order])]),
        first_tokens=first_tokens.astype(np.int32),
        first_starts=np.append(first_starts, len(text)).astype(np.int32),
        sieve=build_filter(text, min_match),
        min_match=min_match,
        max_match=max_match,
        max_draft=max_draft,
        step=step,
    )


def _directory(distinct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `first_tokens`, and the tokens whose starts are stored. If it takes no more room,
    store the starts of all numbers, and no tokens."""
    numbers = np.arange(END, distinct.max(initial=END) + 1)
    is_dense = distinct.min(initial=END) == END and len(numbers) <= 2 * len(distinct)
    return (distinct[:0], numbers) if is_dense else (distinct, distinct)


def response_text(
    prompt_token_ids: Tokens, response: Tokens, turns: Turns, tail_tokens: int
) -> np.ndarray:
    """Return the parts of a response in the form of `HistoryIndex.text`. `tail_tokens`: most tokens
    before a turn that its part begins with."""
    parts = []
    for number, (before, sampled) in enumerate(split_turns(prompt_token_ids, response, turns)):
        tail = before[-tail_tokens:]
        parts += [as_context(tail) if number else tail, sampled, np.array([END], np.int32)]
    return np.concatenate(parts)


def num_parts(turns: Turns) -> int:
    """Return how many parts of the text a response has."""
    return max(1, len(turns))


def split_turns(
    prompt_token_ids: Tokens, response: Tokens, turns: Turns
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all tokens before each turn, and the tokens that it sampled; both int32."""
    tokens = np.concatenate([np.asarray(part, np.int32) for part in (prompt_token_ids, response)])
    at = len(prompt_token_ids)
    for num_sampled, num_observed in turns or [(len(response), 0)]:
        yield tokens[:at], tokens[at : at + num_sampled]
        at += num_sampled + num_observed


def as_context(token_ids: np.ndarray) -> np.ndarray:
    """Return the numbers that stand for tokens before a later turn: all are below `END`."""
    return END - 1 - token_ids


def turn_sizes(recorded: Iterable[Mapping[str, Any]] | None) -> Turns:
    """Return the sizes of a response's turns, as the store has them. None: it has no turns."""
    return [(turn["num_sampled"], turn["num_observed"] or 0) for turn in recorded or ()]


def response_weights(rewards: Sequence[float]) -> np.ndarray:
    """Return the weight of each response to one prompt, from its reward; int64 [responses]."""
    values = np.asarray(rewards, dtype=np.float64)
    if not len(values):
        return np.empty(0, np.int64)
    assert np.isfinite(values).all()
    scaled = np.rint((values - min(0.0, float(values.min()))) / RESOLUTION)
    assert scaled.max(initial=0.0) <= _MAX_WEIGHT, "a reward is too large to be summed exactly"
    return scaled.astype(np.int64)
