"""Seconds below which no schedule rolls these responses out, whatever it knows beforehand. Pure.

Known to it: every length, and how often each drafter is right for each response. For each token it
may take another drafter, window and mode, and another engine, for nothing. All GPUs verify;
drafters have others, which are not counted.

A step takes s + sum_i c_i, with s for the weights and c_i for the computation and the context of
request i, and yields g tokens for it (`engines.latency.expectation`): coupled 1 + p + ... + p^w,
with w D in s; drafted for meanwhile, as many as in a step of r D seconds, which it takes at least.
A request of the step has a share c_i / sum_j c_j of its engine. So a token of a request whose
steps take s + y costs, in seconds of an engine and with a price l of its own seconds,

    (c + s c / y + l (s + y)) / g        y >= c, as a step has at least one request

which is least at y = sqrt(s c / l) and, its least being h(l), for every l

    seconds of engines for a response in T seconds >= sum_tokens h(l) - l T        (weak duality)

T is too short where all responses together need more than T of every engine, or where one that is
alone all the time needs more than T. h is concave in the context, which is taken at a few lengths
and straight between these; p is rounded up.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq

from engines.latency.expectation import streamed_step

PRICES = np.geomspace(1e-3, 1e3, 37)
"""Prices l that are tried: of a batch of hundreds to one of less than one."""
WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)
PACES = np.geomspace(0.5, 32, 37)
"""Paces r that are told apart."""
ROWS = 200
"""Acceptances that are told apart."""
_CONTEXTS = 33
"""Contexts, evenly up to the longest."""
_NODES = np.array([0.0, 0.25, 1.0])
"""Shares of a response at which the context is taken."""
_WEIGHTS = np.array([0.125, 0.5, 0.375])
"""Trapezoids between these."""


@dataclass(frozen=True, slots=True)
class VerifierCosts:
    """Seconds of a step: `step_s + sequence_s (tokens of all) + token_s (context of all)`."""

    step_s: float
    sequence_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class KnownDrafter:
    """One drafter, and how often it is right."""

    draft_s: float
    """Seconds of drafting one token for one request, D."""
    acceptance: np.ndarray
    """[responses], each in [0, 1]."""


@dataclass(frozen=True, slots=True)
class RolloutBound:
    """Seconds that a rollout takes at least."""

    alone_s: float
    """Slowest response, alone on its engine all the time."""
    work_s: float
    """Computation and contexts of all steps over all engines, weights read for nothing."""
    seconds: float
    """Least with both at once, and the weights: never below either."""


class _Option(NamedTuple):
    """One way to make a step, by acceptance."""

    tokens: np.ndarray
    """[ROWS + 1]"""
    verified: np.ndarray
    """[ROWS + 1]"""
    before_s: float = 0.0
    least_s: float = 0.0


def bound_rollout(
    costs: VerifierCosts,
    prompt_tokens: np.ndarray,
    response_tokens: np.ndarray,
    drafters: Sequence[KnownDrafter],
    num_engines: int,
) -> RolloutBound:
    """`prompt_tokens`, `response_tokens`: [responses], whole numbers, the latter positive."""
    contexts = _Contexts.of(prompt_tokens, response_tokens)
    rows = [np.ceil(one.acceptance * ROWS - 1e-9).astype(int) for one in drafters]

    def total(price: float | None) -> np.ndarray:
        """Least of each response's tokens at this price, [responses]; None: alone, in seconds."""
        least = partial(_least, costs, contexts.grid, price)
        tables = [least(_options(one.draft_s)) for one in drafters]
        found = [contexts.look_up(*pair) for pair in zip(tables, rows, strict=True)]
        plain = contexts.look_up(least([_PLAIN]), np.zeros(len(response_tokens), int))
        return response_tokens * (np.minimum.reduce([plain, *found]) @ _WEIGHTS)

    alone_s = float(total(None).max())
    work_s = float(total(0.0).sum()) / num_engines
    priced = np.array([total(price) for price in PRICES])

    def missing_s(seconds: float) -> float:
        """Engine seconds that are needed beyond those that there are."""
        needed = (priced - PRICES[:, None] * seconds).max(axis=0)
        return float(needed.sum()) - num_engines * seconds

    low_s = max(alone_s, work_s)
    if missing_s(low_s) <= 0:
        return RolloutBound(alone_s, work_s, low_s)
    high_s = 2 * low_s
    while missing_s(high_s) > 0:
        high_s *= 2
    return RolloutBound(alone_s, work_s, float(brentq(missing_s, low_s, high_s, rtol=1e-4)))


class _Contexts(NamedTuple):
    """Context of every response at each of the nodes, on a grid."""

    grid: np.ndarray
    """[contexts], tokens."""
    low: np.ndarray
    """[responses, nodes], place on the grid."""
    share: np.ndarray
    """[responses, nodes], of the way to the next place."""

    @classmethod
    def of(cls, prompt_tokens: np.ndarray, response_tokens: np.ndarray) -> "_Contexts":
        at = prompt_tokens[:, None] + response_tokens[:, None] * _NODES
        grid = np.linspace(0.0, at.max(), _CONTEXTS)
        low = np.minimum((at / grid[1]).astype(int), _CONTEXTS - 2)
        return cls(grid, low, at / grid[1] - low)

    def look_up(self, table: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Values of a table [ROWS + 1, contexts], [responses, nodes]."""
        own = rows[:, None]
        below, above = table[own, self.low], table[own, self.low + 1]
        return below + self.share * (above - below)


def _least(
    costs: VerifierCosts, grid: np.ndarray, price: float | None, options: Iterable[_Option]
) -> np.ndarray:
    """Priced engine seconds of a token, [ROWS + 1, contexts]; without a price its seconds alone."""
    least = np.full((ROWS + 1, len(grid)), np.inf)
    for option in options:
        np.minimum(least, _token(costs, grid, price, option), out=least)
    return least


def _token(
    costs: VerifierCosts, grid: np.ndarray, price: float | None, option: _Option
) -> np.ndarray:
    own = costs.sequence_s * (1.0 + option.verified[:, None]) + costs.token_s * grid
    fixed_s = costs.step_s + option.before_s
    least = np.maximum(own, option.least_s - fixed_s)
    tokens = option.tokens[:, None]
    if price is None:
        return (fixed_s + least) / tokens
    if price == 0.0:
        return own / tokens
    others = np.maximum(np.sqrt(fixed_s * own / price), least)
    return (own + fixed_s * own / others + price * (fixed_s + others)) / tokens


_PLAIN = _Option(np.ones(ROWS + 1), np.zeros(ROWS + 1))


def _options(draft_s: float) -> Iterator[_Option]:
    for window in WINDOWS:
        powers = np.arange(ROWS + 1)[:, None] / ROWS
        tokens = (powers ** np.arange(window + 1)).sum(axis=1)
        yield _Option(tokens, np.full(ROWS + 1, float(window)), before_s=window * draft_s)
        for pace, (tokens, verified) in _streamed(window).items():
            yield _Option(tokens, verified, least_s=pace * draft_s)


@cache
def _streamed(window: int) -> Mapping[float, tuple[np.ndarray, np.ndarray]]:
    """Tokens and verified drafts of steps that take at least so many drafts' time, [ROWS + 1]
    each. The tokens are the most up to the next pace, as paces between are not told apart."""
    paces = [pace for pace in PACES.tolist() if pace <= 2 * window] + [2.0 * window]
    steps = {
        pace: [streamed_step(window, row / ROWS, pace) for row in range(ROWS + 1)] for pace in paces
    }
    found, most = {}, np.zeros(ROWS + 1)
    for pace, following in zip(paces, [*paces[1:], paces[-1]], strict=True):
        most = np.maximum(most, [step.tokens for step in steps[following]])
        found[pace] = most, np.array([step.num_verified for step in steps[pace]])
    return found
