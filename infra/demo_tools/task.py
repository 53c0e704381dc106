"""The task of `make demo-tools`: sums of products, with a calculator to call.

    12*34+56*78=?

There are three ways to solve a problem:

    whole    calls calculate with 12*34+56*78, reads 4776 and answers #### 4776
    apart    calls calculate with 12*34 and with 56*78 in one turn, and adds in the head
    head     answers at once

A solver who calls sometimes copies a digit wrong, or leaves out the last number. The calculator
refuses that, and the solver calls again. Sums in the head are often wrong, and products nearly
always. A small model that learns from all these solvers is worse than they are at mental
arithmetic. Reinforcement learning has to find that the calculator pays.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from infra.demo_tools.calculator import calculate
from infra.splits import draw_distinct
from refrain.engines.environment.tools import failure_of, observation_of

SMALLEST, LARGEST = 10, 99
"""Bounds of the four numbers of a problem."""
WAYS = {"whole": 0.5, "apart": 0.25, "head": 0.25}
"""Share of solvers who work in each way."""
MISCOPY_SHARE = 0.08
"""Chance that a call has a wrong digit."""
BROKEN_SHARE = 0.1
"""Chance that the last number of a turn's calls is missing."""
SUM_SLIP_SHARE = 0.5
"""Chance that a sum in the head is wrong."""
PRODUCT_SLIP_SHARE = 0.9
"""Chance that an answer without calls is wrong."""
SLIPS = (-1000, -100, -10, -1, 1, 10, 100, 1000)
"""Errors of mental arithmetic."""

DIGITS = "0123456789"
BEFORE_EXPRESSION = (
    "<tool_call>",
    '{"name": "',
    calculate.__name__,
    '", "arguments": {',
    '"expression": "',
)
"""Words of a call before the expression."""
AFTER_EXPRESSION = ('"}}', "</tool_call>")
ANSWER = "#### "
REFUSED = "Error: ValueError: "
"""Beginning of the calculator's answer to an expression that it refuses."""
WORDS = (*BEFORE_EXPRESSION, *AFTER_EXPRESSION, ANSWER, REFUSED)
"""Texts that are one token each, so that a call has 18."""


@dataclass(frozen=True)
class SumOfProducts:
    """Problem: two products to add."""

    factors: tuple[int, int, int, int]

    @property
    def products(self) -> tuple[str, str]:
        """The two products as text."""
        a, b, c, d = self.factors
        return f"{a}*{b}", f"{c}*{d}"

    @property
    def expression(self) -> str:
        return "+".join(self.products)

    @property
    def prompt(self) -> str:
        """The text of the problem."""
        return f"{self.expression}=?"

    @property
    def answer(self) -> int:
        return calculate(self.expression)


@dataclass(frozen=True)
class SolverTurn:
    """A turn of a solver, and what the calculator answers."""

    text: str
    answers: tuple[str, ...] = ()
    """The calculator's answer to each call, as the solver reads it."""


def draw_problem(rng: Random) -> SumOfProducts:
    a, b, c, d = (rng.randint(SMALLEST, LARGEST) for _ in range(4))
    return SumOfProducts((a, b, c, d))


def draw_problems(split: str, rng: Random) -> Iterator[SumOfProducts]:
    """Yield distinct problems of one split, without end."""
    return draw_distinct(split, partial(draw_problem, rng))


def solve(problem: SumOfProducts, rng: Random) -> list[SolverTurn]:
    """Return a conversation that ends with the answer line, in one of `WAYS`."""
    (way,) = rng.choices(tuple(WAYS), tuple(WAYS.values()))
    if way == "head":
        return [_final(problem.answer + _draw_slip(PRODUCT_SLIP_SHARE, rng))]
    turns = _calling([problem.expression] if way == "whole" else problem.products, rng)
    slip = _draw_slip(SUM_SLIP_SHARE, rng) if way == "apart" else 0
    return [*turns, _final(sum(map(int, turns[-1].answers)) + slip)]


def calling_turn(expressions: Sequence[str]) -> SolverTurn:
    """Return a turn that calls the calculator once for each expression."""
    before, after = "".join(BEFORE_EXPRESSION), "".join(AFTER_EXPRESSION)
    text = "".join(f"{before}{one}{after}" for one in expressions)
    return SolverTurn(text, tuple(map(_answer_to, expressions)))


def _calling(expressions: Sequence[str], rng: Random) -> list[SolverTurn]:
    """Return one turn of calls, or two if the calculator refuses one in the first."""
    turns = []
    if rng.random() < BROKEN_SHARE:
        turns.append(calling_turn([*expressions[:-1], expressions[-1].rstrip(DIGITS)]))
    turns.append(calling_turn([_copied(one, rng) for one in expressions]))
    return turns


def _answer_to(expression: str) -> str:
    try:
        return observation_of(calculate(expression))
    except ValueError as error:
        return failure_of(error)


def _copied(expression: str, rng: Random) -> str:
    """Return the expression, with a wrong digit in `MISCOPY_SHARE` of all cases."""
    if rng.random() >= MISCOPY_SHARE:
        return expression
    at = rng.choice([i for i, one in enumerate(expression) if one in DIGITS])
    return expression[:at] + rng.choice(DIGITS) + expression[at + 1 :]


def _draw_slip(share: float, rng: Random) -> int:
    return rng.choice(SLIPS) if rng.random() < share else 0


def _final(value: int) -> SolverTurn:
    return SolverTurn(f"{ANSWER}{value}")
