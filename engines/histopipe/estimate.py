"""How long a ranking group takes on so many engines: t = f(l, dp) of RhymeRL, section 6.4. Pure.

    lengths ─dealt─► those of one engine ─► when each starts and ends, in decoding steps
                                                 └─► batch and context ─latency─► seconds

Deviation: the paper estimates from a group's representative length alone, the mean; here every
response has its own, so that the batch shrinks as responses end (`representative_only` gives the
paper's). Prefill and preemption are left out: both are small beside decoding, and alike in groups
of equal size.
"""

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from engines.histopipe.ranking import typical_tokens
from engines.latency.interface import Latency
from schemas.rollout import LengthHistory

MAX_SEGMENTS = 64
"""Latencies that one estimate asks for, at most. With more ends than that neighbours are merged,
the fewer the closer to the last end: there the batch changes most."""


def estimate_rollout_s(
    latency: Latency,
    tp_degree: int,
    lengths: np.ndarray,
    num_engines: int,
    *,
    max_num_seqs: int = 256,
    prompt_tokens: float = 256.0,
    tokens_per_pass: float = 1.0,
    window: int = 0,
    representative_only: bool = False,
) -> float:
    """Seconds until the slowest of `num_engines` engines has decoded its share of the responses.

    `lengths` are response tokens, [responses], dealt one by one, or [prompts, samples], where the
    samples of a prompt stay together. Ranked from the longest, the slowest engine has each
    `num_engines`-th. With speculation a step verifies `window` draft tokens of each response,
    which gains `tokens_per_pass` (an acceptance length); drafting costs nothing, since engines
    draft from history while the GPU is busy.

    It falls with `num_engines` when the latency rises with batch and context. Not quite where
    ends are merged or prompts have samples of unlike lengths.
    """
    assert num_engines > 0
    assert lengths.size > 0
    assert tokens_per_pass >= 1.0
    if representative_only:
        lengths = np.full_like(lengths, lengths.mean(), dtype=float)
    passes = _slowest_share(lengths, num_engines) / tokens_per_pass
    starts = _starts(passes, max_num_seqs)
    widths, batches, contexts = _segments(starts, passes, prompt_tokens, tokens_per_pass)

    def step_s(batch: int, context: float) -> float:
        if window:
            return latency.verify_s(tp_degree, batch, context, window)
        return latency.decode_s(tp_degree, batch, context)

    rounded = np.maximum(1, np.rint(batches)).astype(int).tolist()
    steps_s = [step_s(*at) for at in zip(rounded, contexts.tolist(), strict=True)]
    return float(np.dot(widths, steps_s))


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


def _slowest_share(lengths: np.ndarray, num_engines: int) -> np.ndarray:
    """Of the engine with the longest responses, the longest first."""
    rows = lengths.reshape(len(lengths), -1)
    ranked = rows[np.argsort(-rows.mean(axis=1), kind="stable")]
    return -np.sort(-ranked[::num_engines].ravel().astype(float))


def _starts(passes: np.ndarray, max_num_seqs: int) -> np.ndarray:
    """The step at which each response joins the batch: a place that becomes free is filled."""
    starts = np.zeros(len(passes))
    places = sorted(passes[:max_num_seqs].tolist())
    for index, steps in enumerate(passes[max_num_seqs:].tolist(), max_num_seqs):
        starts[index] = places[0]
        heapq.heapreplace(places, places[0] + steps)
    return starts


def _segments(
    starts: np.ndarray, passes: np.ndarray, prompt_tokens: float, tokens_per_pass: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps, mean batch, mean context tokens) from one end to the next.

    The context of a segment is the integral of what each response in it has by then: a response
    that runs from s to e has prompt + rate * (t - s) at t, and min(max(t, s), e) - s =: u steps
    until t, hence prompt * u + rate * u^2 / 2 up to t.
    """
    points = np.unique(np.concatenate(([0.0], starts + passes)))
    if len(points) > MAX_SEGMENTS + 1:
        from_last = np.geomspace(1, len(points), MAX_SEGMENTS + 1).astype(int)
        points = points[len(points) - np.unique(from_last)[::-1]]
    until = np.clip(points[:, None] - starts, 0.0, passes)
    steps = until.sum(axis=1)
    tokens = prompt_tokens * steps + tokens_per_pass * np.square(until).sum(axis=1) / 2
    widths = np.diff(points)
    return widths, np.diff(steps) / widths, np.diff(tokens) / widths
