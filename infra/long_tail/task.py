"""The second task: long chains of sums modulo 100, whose lengths have a long tail.

A problem is a chain like the demo's (`infra.demo.task`). All numbers have two digits:

    q=50 r=q-07 s=r+38 ... s=?

A solution states each sum, looks up its value, and ends with GSM8K's answer line. There are two
ways to solve a problem. The first token of a response shows which one it uses:

    hasty      r=q-07=50-07=43                    result at once, sometimes wrong
    careful    ?
               r=q-07=50-07=50-7=43;43+07=50      tens, ones and a check: never wrong

A careful solution is nearly twice as long, and a careful solver sometimes starts over. The number
of sums has a long tail. So lengths vary between prompts, and between the responses to one prompt.

A model that learns mostly from hasty solvers gives short responses at first. Then reinforcement
learning finds that care pays, and the median length of a prompt's responses nearly doubles from one
epoch to the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from string import ascii_letters

from infra.splits import draw_distinct

NAMES = ascii_letters
"""Names of the values of a chain, in this order. After the last name comes the first."""
MODULUS = 100

MIN_TERMS, MAX_TERMS = 12, 40
MEDIAN_EXTRA_TERMS, EXTRA_TERMS_SIGMA = 6.0, 0.9
"""The number of terms above MIN_TERMS is log-normal. The median problem has 18 terms, and one in
fourteen has MAX_TERMS."""

CARE = "?"
"""The line with which a careful solver begins and starts over."""
SLIP_SHARE = 0.1
"""Chance that the result of a hasty line is wrong."""
SLIPS = (-10, -2, -1, 1, 2, 10)
AGAIN_SHARE = 0.008
"""Chance that a careful solver starts over after a line, except the last."""


@dataclass(frozen=True)
class Chain:
    """A first value, and the signed terms to add to it one by one."""

    first_name: int
    """Index of the first value's name in NAMES."""
    start: int
    terms: tuple[int, ...]

    def name(self, index: int) -> str:
        """Return the name of the value after `index` terms."""
        return NAMES[(self.first_name + index) % len(NAMES)]

    @property
    def prompt(self) -> str:
        """The text of the problem."""
        sums = [self.sum_after(index) for index in range(1, len(self.terms) + 1)]
        start = f"{self.name(0)}={self.start:02d}"
        return " ".join([start, *sums, f"{self.name(len(self.terms))}=?"])

    @property
    def answer(self) -> int:
        """The value of the last name."""
        return (self.start + sum(self.terms)) % MODULUS

    def sum_after(self, index: int) -> str:
        """Return the sum that gives the value after `index` terms, written with names."""
        return f"{self.name(index)}={self.name(index - 1)}{_signed(self.terms[index - 1])}"


def draw_num_terms(rng: Random) -> int:
    """Draw a problem's number of terms. Most problems are short, a few are long."""
    extra = MEDIAN_EXTRA_TERMS * rng.lognormvariate(0.0, EXTRA_TERMS_SIGMA)
    return min(MIN_TERMS + round(extra), MAX_TERMS)


def draw_problem(rng: Random, num_terms: int) -> Chain:
    """Draw a problem with `num_terms` terms."""
    terms = [rng.choice((-1, 1)) * rng.randrange(1, MODULUS) for _ in range(num_terms)]
    return Chain(rng.randrange(len(NAMES)), rng.randrange(MODULUS), tuple(terms))


def draw_problems(split: str, rng: Random) -> Iterator[Chain]:
    """Yield distinct problems of one split, without end."""
    return draw_distinct(split, lambda: draw_problem(rng, draw_num_terms(rng)))


def solve(problem: Chain, careful: bool, rng: Random) -> str:
    """Return a solution that ends with the answer line. A hasty one may be wrong."""
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
    """Return the end of a careful line: add the tens, then the ones, then check the result by
    subtracting the term."""
    ones = abs(term) % 10 * (1 if term > 0 else -1)
    sign = "-" if term < 0 else "+"
    tens_done, result = (value + term - ones) % MODULUS, (value + term) % MODULUS
    check = f"{result:02d}{_signed(-term)}={value:02d}"
    return f"={tens_done:02d}{sign}{abs(ones)}={result:02d};{check}"


def _signed(term: int) -> str:
    """Return a term as a sign and two digits."""
    return f"{term:+03d}"
