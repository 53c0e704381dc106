"""The demo's task: short chains of sums, solved line by line.

A problem names a chain of values and asks for the last one:

    a=17 b=a+5 c=b-38 ... c=?

A solution computes the values in order, each line from the line before, and ends with GSM8K's
answer line. A solver's `Habits` decide how a line is computed:

    b=17+5=22             a plain line: one term, the result at once
    c=72-38=42-8=34       a split line: first the tens, then the ones (never wrong)
    d=34+20-6=48          a merged line: two terms at once, often wrong

The supervised corpus mixes solvers of all habits. A model trained on it can work carefully but does
not always do so. Reinforcement learning has to find that care pays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from infra.splits import draw_distinct

NAMES = "abcdefghijklmn"
MAX_VALUE = 99
"""All values are in 0..MAX_VALUE, so no value needs a third digit or a sign."""

STOP_SHARE = 0.25
"""Chance that a chain ends after each term. So the number of terms is geometric."""
TWO_DIGIT_SHARE = 0.45
"""Chance that a term is in 10..60. Otherwise it is in 1..9."""
SLIPS = (-10, -2, -1, 1, 2, 10)
"""Errors that a hasty line may make."""


@dataclass(frozen=True)
class Problem:
    """A first value, and the signed terms to add to it one by one."""

    start: int
    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The text of the problem."""
        lines = [f"a={self.start}"]
        lines += [f"{NAMES[i + 1]}={NAMES[i]}{term:+d}" for i, term in enumerate(self.terms)]
        return " ".join([*lines, f"{NAMES[len(self.terms)]}=?"])

    @property
    def answer(self) -> int:
        """The value of the last name."""
        return self.start + sum(self.terms)


@dataclass(frozen=True)
class Habits:
    """Habits of a solver. Each share is a probability per line."""

    merge_share: float
    """Chance that a line adds two terms at once."""
    split_share: float
    """Chance that a line adds the tens of a two-digit term first."""
    merge_slip_share: float = 0.45
    """Chance that a merged line's result is wrong."""
    plain_slip_share: float = 0.2
    """Chance that a plain line with a two-digit term is wrong."""


CAREFUL = Habits(merge_share=0.0, split_share=1.0)
CAREFUL_SHARE = 0.25
"""Share of always careful solvers in the population."""
HASTIEST_MERGE_SHARE = 0.6


def draw_habits(rng: Random) -> Habits:
    """Draw the habits of one solver of the population, from careful to hasty."""
    if rng.random() < CAREFUL_SHARE:
        return CAREFUL
    return Habits(merge_share=rng.uniform(0.0, HASTIEST_MERGE_SHARE), split_share=rng.random())


def draw_problem(rng: Random) -> Problem:
    """Draw a problem with a geometric number of terms and all values in 0..MAX_VALUE."""
    start = value = rng.randint(1, MAX_VALUE)
    terms: list[int] = []
    while len(terms) < len(NAMES) - 1:
        terms.append(_draw_term(value, rng))
        value += terms[-1]
        if rng.random() < STOP_SHARE:
            break
    return Problem(start, tuple(terms))


def draw_problems(split: str, rng: Random) -> Iterator[Problem]:
    """Yield distinct problems of one split, without end."""
    return draw_distinct(split, partial(draw_problem, rng))


def solve(problem: Problem, habits: Habits, rng: Random) -> str:
    """Return a solution that ends with the answer line. It may be wrong, depending on habits."""
    value, done, lines = problem.start, 0, []
    while done < len(problem.terms):
        merged = rng.random() < habits.merge_share and done + 1 < len(problem.terms)
        terms = problem.terms[done : done + 1 + merged]
        done += len(terms)
        work, result = _work_line(value, terms, problem.terms[done:], habits, rng)
        lines.append(f"{NAMES[done]}={work}={result}")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def _draw_term(value: int, rng: Random) -> int:
    """Draw a signed term that keeps the value in 0..MAX_VALUE."""
    while True:
        size = rng.randint(10, 60) if rng.random() < TWO_DIGIT_SHARE else rng.randint(1, 9)
        term = rng.choice((-size, size))
        if 0 <= value + term <= MAX_VALUE:
            return term


def _work_line(
    value: int, terms: tuple[int, ...], later: tuple[int, ...], habits: Habits, rng: Random
) -> tuple[str, int]:
    """Return the computation of one line and its result, which may be wrong."""
    work = f"{value}" + "".join(f"{term:+d}" for term in terms)
    result = value + sum(terms)
    if len(terms) > 1:
        return work, result + _draw_slip(result, later, habits.merge_slip_share, rng)
    if abs(terms[0]) < 10:
        return work, result
    if rng.random() < habits.split_share:
        return work + _split_tail(value, terms[0]), result
    return work, result + _draw_slip(result, later, habits.plain_slip_share, rng)


def _split_tail(value: int, term: int) -> str:
    """Return the middle of a split line, after the tens are added and before the ones are."""
    ones = abs(term) % 10 * (1 if term > 0 else -1)
    return f"={value + term - ones}{ones:+d}" if ones else ""


def _draw_slip(result: int, later: tuple[int, ...], share: float, rng: Random) -> int:
    """Return an error with chance `share`, else 0. An error keeps later values in 0..MAX_VALUE."""
    if rng.random() >= share:
        return 0
    values = [result]
    for term in later:
        values.append(values[-1] + term)
    fitting = [s for s in SLIPS if min(values) + s >= 0 and max(values) + s <= MAX_VALUE]
    return rng.choice(fitting) if fitting else 0
