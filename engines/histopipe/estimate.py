"""Predicts the time of a ranking group on n engines: t = f(l, dp) of RhymeRL, section 6.4. Pure.

    passes ─dealt─► passes of one engine ─► start and end of each, in decoding steps
                                                └─► batch and context ─latency─► seconds

Deviation: the paper uses only a group's representative length, the mean. Here each response has its
own length, so the batch shrinks as responses end. Prefill is left out: it is small beside decoding,
and similar in groups of equal size.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from refrain.engines.histopipe.ranking import context_rates, typical_tokens
from refrain.engines.latency.forecast import forecast
from refrain.engines.latency.interface import Latency
from refrain.schemas.rollout import LengthHistory

MAX_SEGMENTS = 64
"""Most latencies that one estimate looks up."""


def estimate_rollout_s(
    latency: Latency,
    tp_degree: int,
    lengths: np.ndarray,
    num_engines: int,
    *,
    max_num_seqs: int = 256,
    prompt_tokens: float = 256.0,
    tokens_per_pass: np.ndarray | float = 1.0,
    context_per_token: np.ndarray | float = 1.0,
    window: int = 0,
    max_context_tokens: float = math.inf,
) -> float:
    """Return seconds until the slowest of `num_engines` engines has decoded its responses.

    `lengths`: response tokens. [responses] are dealt one by one; with [prompts, samples], the
    samples of a prompt stay together. The slowest engine gets every `num_engines`-th, starting with
    the most passes.

    `window`: draft tokens that a step verifies for each response. `tokens_per_pass`: the acceptance
    length, one for all or shaped as `lengths`. Drafting takes no time, because engines draft from
    history while the GPU is busy. `context_per_token`: from `ranking.context_rates`, [prompts, 1],
    or one for all. `max_context_tokens`: tokens that the KV cache holds. A larger
    batch runs in parts and takes proportionally more steps.

    The result falls with `num_engines` if the latency rises with batch and context. There are small
    exceptions where ends are merged or the samples of a prompt differ in length.
    """
    assert num_engines > 0
    assert lengths.size > 0
    rates = np.broadcast_to(tokens_per_pass, lengths.shape)
    assert (rates >= 1.0).all()
    passes = (lengths / rates).reshape(len(lengths), -1).mean(axis=1)
    slowest = np.argsort(-passes, kind="stable")[::num_engines]
    growth = np.broadcast_to(context_per_token, lengths.shape)
    own, own_rates, own_growth = (of[slowest].ravel() for of in (lengths, rates, growth))
    return forecast(
        latency,
        tp_degree,
        np.column_stack(
            np.broadcast_arrays(prompt_tokens, own, own_rates, window, 0.0, own_growth)
        ),
        max_num_seqs=max_num_seqs,
        max_segments=MAX_SEGMENTS,
        max_context_tokens=max_context_tokens,
    ).finish_s


def expected_lengths(
    prompt_keys: Sequence[str], history: Mapping[str, LengthHistory], group_size: int
) -> np.ndarray:
    """Return the expected response tokens of a step, [prompts, samples].

    A history has a prompt's median and longest response. Lengths are spread evenly in logarithms
    between the longest and as far below the median: length_k = median * (longest / median)^u_k with
    u_k from -1 to 1. A prompt without history is typical: all its samples have the same length.
    """
    typical = typical_tokens(prompt_keys, history)
    unknown = LengthHistory(typical, 0)
    known = [history.get(key, unknown) for key in prompt_keys]
    medians = np.array([max(1.0, lengths.median_tokens) for lengths in known])
    longest = np.maximum(medians, [lengths.longest_tokens for lengths in known])
    spread = np.linspace(-1.0, 1.0, group_size) if group_size > 1 else np.zeros(1)
    return medians[:, None] * (longest / medians)[:, None] ** spread


def context_growth(prompt_keys: Sequence[str], history: Mapping[str, LengthHistory]) -> np.ndarray:
    """Return `ranking.context_rates` as an array, [prompts, 1]."""
    rates = context_rates(prompt_keys, history)
    return np.array([rates[key] for key in prompt_keys])[:, None]
