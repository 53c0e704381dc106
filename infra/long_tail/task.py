"""The second task: long chains of sums modulo 100, with a long tail of lengths.

A problem is a chain as the demo's (`infra.demo.task`), with all numbers of two digits:

    q=50 r=q-07 s=r+38 ... s=?

A solution states each sum, looks its value up, and closes with GSM8K's answer line. There are two
ways of working, told apart by a response's first token:

    hasty      r=q-07=50-07=43                    at once, and slips now and then
    careful    ?
               r=q-07=50-07=50-7=43;43+07=50      tens, ones and a check: never slips

A careful solution is nearly twice as long, and a careful solver starts over now and then. How many
sums there are is drawn with a long tail, so lengths have two: of prompts, and of one prompt's
responses. A model that learns mostly from hasty solvers answers shortly at first; as reinforcement
learning finds that care pays, prompts nearly double their median length from one epoch to the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from string import ascii_letters

from infra.splits import draw_distinct

NAMES = ascii_letters
"""Names follow each other in this order, and the first follows the last."""
MODULUS = 100

MIN_TERMS, MAX_TERMS = 12, 40
MEDIAN_EXTRA_TERMS, EXTRA_TERMS_SIGMA = 6.0, 0.9
"""Terms beyond the fewest are log-normal: 18 in the median, the most in one problem of fourteen."""

CARE = "?"
"""The line with which a careful solver begins, and begins again."""
SLIP_SHARE = 0.1
"""Chance that the result of a hasty line is wrong."""
SLIPS = (-10, -2, -1, 1, 2, 10)
AGAIN_SHARE = 0.008
"""Chance that a careful solver starts over after a line, where not all is done yet."""


@dataclass(frozen=True)
class Chain:
    """A first value and the signed terms that are added to it one after the other."""

    first_name: int
    """Place of the first value's name in NAMES."""
    start: int
    terms: tuple[int, ...]

    def name(self, index: int) -> str:
        """Name of the value after `index` terms."""
        return NAMES[(self.first_name + index) % len(NAMES)]

    @property
    def prompt(self) -> str:
        """The problem as the user states it."""
        sums = [self.sum_after(index) for index in range(1, len(self.terms) + 1)]
        start = f"{self.name(0)}={self.start:02d}"
        return " ".join([start, *sums, f"{self.name(len(self.terms))}=?"])

    @property
    def answer(self) -> int:
        """The value of the last name."""
        return (self.start + sum(self.terms)) % MODULUS

    def sum_after(self, index: int) -> str:
        """The sum that gives the value after `index` terms, by names."""
        return f"{self.name(index)}={self.name(index - 1)}{_signed(self.terms[index - 1])}"


def draw_num_terms(rng: Random) -> int:
    """Number of terms of a problem: most are short, a few are long."""
    extra = MEDIAN_EXTRA_TERMS * rng.lognormvariate(0.0, EXTRA_TERMS_SIGMA)
    return min(MIN_TERMS + round(extra), MAX_TERMS)


def draw_problem(rng: Random, num_terms: int) -> Chain:
    """A problem of so many terms."""
    terms = [rng.choice((-1, 1)) * rng.randrange(1, MODULUS) for _ in range(num_terms)]
    return Chain(rng.randrange(len(NAMES)), rng.randrange(MODULUS), tuple(terms))


def draw_problems(split: str, rng: Random) -> Iterator[Chain]:
    """Distinct problems of one split, without end."""
    return draw_distinct(split, lambda: draw_problem(rng, draw_num_terms(rng)))


def solve(problem: Chain, careful: bool, rng: Random) -> str:
    """A worked solution, which ends with the answer line; wrong where a hasty solver slipped."""
    lines, value, done = [CARE] if careful else [], problem.start, 0
    while done < len(problem.terms):
        if careful and done and rng.random() < AGAIN_SHARE:
            lines, value, done = [*lines, CARE], problem.start, 0
        term = problem.terms[done]
        done += 1
        result = (value + term) % MODULUS
        if not careful and rng.random() < SLIP_SHARE:
            result = (result + rng.choice(SLIPS)) % MODULUS
        tail = _careful_tail(value, term) if careful else f"={result:02d}"
        lines.append(f"{problem.sum_after(done)}={value:02d}{_signed(term)}{tail}")
        value = result
    return "\n".join([*lines, f"#### {value:02d}"])


def _careful_tail(value: int, term: int) -> str:
    """The end of a careful line: the tens are done, then the ones, then the term is taken back."""
    ones = abs(term) % 10 * (1 if term > 0 else -1)
    sign = "-" if term < 0 else "+"
    tens_done, result = (value + term - ones) % MODULUS, (value + term) % MODULUS
    check = f"{result:02d}{_signed(-term)}={value:02d}"
    return f"={tens_done:02d}{sign}{abs(ones)}={result:02d};{check}"


def _signed(term: int) -> str:
    """A sign and two digits."""
    return f"{term:+03d}"
