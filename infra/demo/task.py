"""The demo's task: short programs of sums, worked out line by line.

A problem names a chain of values and asks for the last one:

    a=17 b=a+5 c=b-38 ... c=?

A solution computes the names in order, each line from the line before, and closes with GSM8K's
answer line. How a line is worked is a matter of `Habits`:

    b=17+5=22             a plain line: one term, the result at once
    c=72-38=42-8=34       a split line: the tens first, then the ones (never slips)
    d=34+20-6=48          a merged line: swallows two terms, and often slips

A supervised corpus mixes solvers of all habits, so a model trained on it can work carefully but
does not always; what reinforcement learning has to find out is that care pays.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from infra.splits import draw_distinct

NAMES = "abcdefghijklmn"
MAX_VALUE = 99
"""Every running value lies in 0..MAX_VALUE, so no line needs a third digit or a sign."""

STOP_SHARE = 0.25
"""Chance that a chain ends after each term from the second name on: a geometric length."""
TWO_DIGIT_SHARE = 0.45
"""Chance that a term is 10..60 rather than 1..9."""
SLIPS = (-10, -2, -1, 1, 2, 10)
"""Errors of a hasty line."""


@dataclass(frozen=True)
class Problem:
    """A first value and the signed terms that are added to it one after the other."""

    start: int
    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The problem as the user states it."""
        lines = [f"a={self.start}"]
        lines += [f"{NAMES[i + 1]}={NAMES[i]}{term:+d}" for i, term in enumerate(self.terms)]
        return " ".join([*lines, f"{NAMES[len(self.terms)]}=?"])

    @property
    def answer(self) -> int:
        """The value of the last name."""
        return self.start + sum(self.terms)


@dataclass(frozen=True)
class Habits:
    """Habits of a solver; each share is a probability per line."""

    merge_share: float
    """Chance that a line swallows two terms."""
    split_share: float
    """Chance that a two-digit term is worked tens first."""
    merge_slip_share: float = 0.45
    """Chance that a merged line's result is wrong."""
    plain_slip_share: float = 0.2
    """Chance that a plain line with a two-digit term is wrong."""


CAREFUL = Habits(merge_share=0.0, split_share=1.0)
CAREFUL_SHARE = 0.25
"""Share of wholly careful solvers in the population."""
HASTIEST_MERGE_SHARE = 0.6


def draw_habits(rng: Random) -> Habits:
    """One solver out of the population: anything from careful to hasty."""
    if rng.random() < CAREFUL_SHARE:
        return CAREFUL
    return Habits(merge_share=rng.uniform(0.0, HASTIEST_MERGE_SHARE), split_share=rng.random())


def draw_problem(rng: Random) -> Problem:
    """A problem with a geometric number of terms, all running values within bounds."""
    start = value = rng.randint(1, MAX_VALUE)
    terms: list[int] = []
    while len(terms) < len(NAMES) - 1:
        terms.append(_draw_term(value, rng))
        value += terms[-1]
        if rng.random() < STOP_SHARE:
            break
    return Problem(start, tuple(terms))


def draw_problems(split: str, rng: Random) -> Iterator[Problem]:
    """Distinct problems of one split, without end."""
    return draw_distinct(split, partial(draw_problem, rng))


def solve(problem: Problem, habits: Habits, rng: Random) -> str:
    """A worked solution, which ends with the answer line; wrong where the solver slipped."""
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
    """A signed term that keeps the running value within bounds."""
    while True:
        size = rng.randint(10, 60) if rng.random() < TWO_DIGIT_SHARE else rng.randint(1, 9)
        term = rng.choice((-size, size))
        if 0 <= value + term <= MAX_VALUE:
            return term


def _work_line(
    value: int, terms: tuple[int, ...], later: tuple[int, ...], habits: Habits, rng: Random
) -> tuple[str, int]:
    """The working of one line and its result, which may have slipped."""
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
    """The middle of a split line: the tens are done, the ones are still to do."""
    ones = abs(term) % 10 * (1 if term > 0 else -1)
    return f"={value + term - ones}{ones:+d}" if ones else ""


def _draw_slip(result: int, later: tuple[int, ...], share: float, rng: Random) -> int:
    """Zero, or with chance `share` a slip after which the later values stay within bounds."""
    if rng.random() >= share:
        return 0
    values = [result]
    for term in later:
        values.append(values[-1] + term)
    fitting = [s for s in SLIPS if min(values) + s >= 0 and max(values) + s <= MAX_VALUE]
    return rng.choice(fitting) if fitting else 0
