"""Machines of PAT by the seconds that it prints: a joint fit, and bounds that need none.

    Fig. 4     a token at TP 2 and 8, 1 and 128 responses, 8 A40         four latencies
    Fig. 11c   generation at TP 2 (`PRINTED_BASE`) and with PAT, 8 H100  two models, four times

Fitted to all eight together: shares, hops and host times of `FITTED`. What is printed of PAT counts
here, with a switch where hindsight says, once; so it is no forecast of it any more, and how far the
fit is from each is published. Assumed: 2,048 tokens of context in Fig. 4.

Bounds: a step of b responses takes what lies between the two printed ends, at either TP degree;
lengths are those of Fig. 3b and one of the maximum. Who had always the faster degree, at no cost,
would gain `most_over_static` over the better one throughout.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import norm

from benchmarks.papers.generate import K, fit_shares
from benchmarks.papers.pat import FITTED, LLAMA, NUM_RESPONSES, POINTS, Point, lengths, machine
from benchmarks.papers.switching import PRINTED_BASE, Steps
from engines.control.effects import Effects
from engines.control.objective import SoonestEnd
from engines.control.outlook import Outlook
from engines.control.reshaping import Reshaping
from engines.control.state import Forecaster
from engines.rollout.moves import EngineView, RolloutView
from engines.simulate.cluster import even, step_requests

LATENCIES_S = {(2, 1): 15.37e-3, (8, 1): 9.64e-3, (2, 128): 24.41e-3, (8, 128): 30.87e-3}
"""Seconds of a token by TP degree and responses on 8 A40 (Fig. 4)."""
CONTEXT_TOKENS = 2048
TIMED = tuple(point for point in POINTS if point.static_s)
WAIT_SHARES = tuple(np.geomspace(1 / 64, 0.9, 10))
SHARED = ("memory_share", "step_overhead_s", "layer_s", "request_s")
OF_A40, OF_H100 = ("hop_s", "link_share"), ("hop_s", "collective_s")
Figures = Mapping[str, Mapping[str, float]]


def residuals(fitted: Figures = FITTED, num_steps: int = 2) -> dict[str, float]:
    """Seconds by the model over those printed, less 1, of each of the eight."""
    found = {}
    on_a40 = machine(Point(LLAMA, "A40", 8, 16), fitted["A40"]).latency
    for (tp, responses), printed_s in LATENCIES_S.items():
        batch = math.ceil(responses * tp / 8)
        decode_s = on_a40.decode_s(tp, batch, batch * CONTEXT_TOKENS)
        found[f"Fig. 4, TP {tp}, {responses} responses"] = decode_s / printed_s - 1
    for point in TIMED:
        assert point.static_s
        assert point.pat_s
        static_s, pat_s = np.mean(list(_hindsight_s(point, fitted, num_steps)), axis=0)
        found[f"{point.name}, TP {PRINTED_BASE}"] = static_s / point.static_s - 1
        found[f"{point.name}, PAT"] = pat_s / point.pat_s - 1
    return found


def _hindsight_s(point: Point, fitted: Figures, num_steps: int) -> Iterator[tuple[float, float]]:
    """(TP 2 throughout, with the best switch) of each step, where lengths are known."""
    on = machine(point, fitted[point.hardware])
    steps = Steps.draw(on, lengths(point), 0)
    for step in steps.steps[:num_steps]:
        scene = steps.scene(step, PRINTED_BASE)
        requests, _ = step_requests(scene.rows, step)
        placed: dict[int, dict] = {engine: {} for engine in range(len(scene.pools[0].engines[2]))}
        for group in even(list(requests), {}, len(placed)):
            placed[group.engine] |= {request.id: 0 for request in requests[group.prompt_key]}
        views = (EngineView(i, of, tp_degree=PRINTED_BASE) for i, of in placed.items())
        known = replace(scene, exact=True).remaining()
        outlook = Outlook(Forecaster(on.latency), known, scene.prompt_tokens)
        state = outlook.forecast(RolloutView(0.0, tuple(views), 0, 0))
        effects = Effects(on.latency, {0: scene.pools[0]}, on.costs())
        reshaping = Reshaping(SoonestEnd(), WAIT_SHARES)
        yield state.end_s, reshaping.least(scene.pools[0], state, effects)


def fit(begin: Figures = FITTED) -> dict[str, dict[str, float]]:
    """Figures of least squared relative residuals, from these on: a minute or two."""

    def unpacked(logs: np.ndarray) -> dict[str, dict[str, float]]:
        values = np.exp(logs).tolist()
        shared = dict(zip(SHARED, values, strict=False))
        a40 = dict(zip(OF_A40, values[len(SHARED) :], strict=False))
        h100 = dict(zip(OF_H100, values[len(SHARED) + len(OF_A40) :], strict=True))
        return {"A40": shared | a40, "H100": shared | h100}

    first = [begin["H100"][name] for name in SHARED]
    first += [begin["A40"][name] for name in OF_A40] + [begin["H100"][name] for name in OF_H100]

    def of(logs: np.ndarray) -> list[float]:
        return [math.log1p(r) for r in residuals(unpacked(logs)).values()]

    return unpacked(least_squares(of, np.log(first), diff_step=1e-3, max_nfev=25).x)


def most_over_static(max_k: int) -> float:
    """Least time of always the faster TP degree, over which the better one throughout takes so many
    times as long; 8 A40, by what is printed alone."""
    unfinished = _unfinished(max_k * K)
    between = {
        tp: np.interp(unfinished, [1, NUM_RESPONSES], [LATENCIES_S[tp, b] for b in (1, 128)])
        for tp in (2, 8)
    }
    faster_s = np.minimum(between[2], between[8]).sum()
    return float(min(s.sum() for s in between.values()) / faster_s)


def _unfinished(max_tokens: int, every: int = 16) -> Sequence[float]:
    """Responses that are not finished, every so many tokens."""
    mu, sigma = fit_shares((8 * K, 0.1085), (16 * K, 0.0218))
    tokens = np.arange(every, max_tokens, every)
    return 1 + (NUM_RESPONSES - 1) * norm.sf((np.log(tokens) - mu) / sigma)


def printed_rows() -> list[dict[str, Any]]:
    """How far the fit is from each printed time, and the bounds."""
    rows = [{"printed": name, "residual": residual} for name, residual in residuals().items()]
    maxima = (6, 8, 12, 16)
    return [
        *rows,
        *({"printed_bound_k": k, "most_over_static": most_over_static(k)} for k in maxima),
    ]
