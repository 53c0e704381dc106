"""How long a ranking group takes on so many engines: t = f(l, dp) of RhymeRL, section 6.4. Pure.

    passes ─dealt─► those of one engine ─► when each starts and ends, in decoding steps
                                                └─► batch and context ─latency─► seconds

Deviation: the paper estimates from a group's representative length alone, the mean; here every
response has its own, so that the batch shrinks as responses end. Prefill is left out: it is small
beside decoding, and alike in groups of equal size.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from engines.histopipe.ranking import typical_tokens
from engines.latency.forecast import plan_segments, step_s
from engines.latency.interface import Latency
from schemas.rollout import LengthHistory

MAX_SEGMENTS = 64
"""Latencies that one estimate asks for, at most."""


def estimate_rollout_s(
    latency: Latency,
    tp_degree: int,
    lengths: np.ndarray,
    num_engines: int,
    *,
    max_num_seqs: int = 256,
    prompt_tokens: float = 256.0,
    tokens_per_pass: np.ndarray | float = 1.0,
    window: int = 0,
    max_context_tokens: float = math.inf,
) -> float:
    """Seconds until the slowest of `num_engines` engines has decoded its share of the responses.

    `lengths` are response tokens, [responses], dealt one by one, or [prompts, samples], where the
    samples of a prompt stay together. Ranked from the most passes, the slowest engine has each
    `num_engines`-th. With speculation a step verifies `window` draft tokens of each response,
    which gains `tokens_per_pass` (an acceptance length; of all or of each, shaped as `lengths`);
    drafting costs nothing, since engines draft from history while the GPU is busy. Of a batch with
    more than `max_context_tokens`, which is what the KV cache holds, only a part runs at once: it
    takes as many steps more.

    It falls with `num_engines` when the latency rises with batch and context. Not quite where
    ends are merged or prompts have samples of unlike lengths.
    """
    assert num_engines > 0
    assert lengths.size > 0
    rates = np.broadcast_to(tokens_per_pass, lengths.shape)
    assert (rates >= 1.0).all()
    passes, rates = _slowest_share(lengths / rates, rates, num_engines)
    segments = plan_segments(passes, prompt_tokens, rates, max_num_seqs, MAX_SEGMENTS)
    at_each = zip(segments.batches.tolist(), segments.context_tokens.tolist(), strict=True)
    steps_s = [step_s(latency, tp_degree, *at, window) for at in at_each]
    turns = np.maximum(1.0, segments.context_tokens / max_context_tokens)
    return float(np.dot(segments.num_steps * turns, steps_s))


def expected_lengths(
    prompt_keys: Sequence[str], history: Mapping[str, LengthHistory], group_size: int
) -> np.ndarray:
    """Response tokens that a step may expect, [prompts, samples].

    A history has a prompt's median and longest response. Between them, and as far below the
    median, the logarithms are spread evenly: length_k = median * (longest / median)^u_k with u_k
    from -1 to 1. A prompt without history counts as typical, all its samples alike.
    """
    typical = typical_tokens(prompt_keys, history)
    unknown = LengthHistory(typical, 0)
    known = [history.get(key, unknown) for key in prompt_keys]
    medians = np.array([max(1.0, lengths.median_tokens) for lengths in known])
    longest = np.maximum(medians, [lengths.longest_tokens for lengths in known])
    spread = np.linspace(-1.0, 1.0, group_size) if group_size > 1 else np.zeros(1)
    return medians[:, None] * (longest / medians)[:, None] ** spread


def _slowest_share(
    passes: np.ndarray, rates: np.ndarray, num_engines: int
) -> tuple[np.ndarray, np.ndarray]:
    """Passes on the engine with the longest responses, the most first, and what each gains."""
    rows = passes.reshape(len(passes), -1)
    share = np.argsort(-rows.mean(axis=1), kind="stable")[::num_engines]
    taken = rows[share].ravel()
    order = np.argsort(-taken, kind="stable")
    return taken[order], rates.reshape(len(rates), -1)[share].ravel()[order]
