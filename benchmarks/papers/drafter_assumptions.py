"""Assumptions about SpecActor's drafters, and those that what it prints leaves standing. Pure.

Neither what a drafter takes nor how often it is right is printed, and both decide what speculation
brings. So both are varied, and a pair of them stands where the simulation gives what the paper
prints, each figure within a tolerance:

    scale of the drafters' seconds x p of 0.5B for a request in the middle ──► points
    points that meet every binding print ──► least, median and most of what is asked

The requests, the cluster and the verifier are the same at all points.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple


class Assumption(NamedTuple):
    """A point of the grid."""

    draft_scale: float
    """Seconds of drafting over those of `benchmarks.papers.drafters`."""
    acceptance: float
    """Probability p that a token drafted by 0.5B is right, for a request in the middle; those of
    the other drafters move with it, on the scale of logits."""


DRAFT_SCALES = (0.4, 0.7, 1.0, 1.4)
ACCEPTANCES = tuple(hundredths / 100 for hundredths in range(56, 92, 2))
GRID = tuple(Assumption(scale, p) for scale in DRAFT_SCALES for p in ACCEPTANCES)


@dataclass(frozen=True, slots=True)
class PaperPrint:
    """A figure that the paper prints, and how near to it a point has to be."""

    name: str
    low: float
    high: float
    tolerance: float
    where: str
    """Place in the paper."""
    binding: bool = True
    """Whether a point must meet it to stand."""

    def met(self, value: float) -> bool:
        return self.low - self.tolerance <= value <= self.high + self.tolerance

    @property
    def printed(self) -> str:
        """Range with its tolerance, for people."""
        if self.low == 0.0:
            return f"at most {self.high:g} + {self.tolerance:g}"
        span = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        return f"{span} +- {self.tolerance:g}"


VANILLA, AT_256, APART, LAST = (
    "coupled over veRL",
    "coupled at 256",
    "disaggregated over veRL",
    "last accepted",
)
PRINTS = (
    PaperPrint(AT_256, 0.0, 1.0, 0.06, '"no or negative speedup" (3, Fig. 6b); read off a picture'),
    PaperPrint(VANILLA, 1.0, 1.03, 0.03, "none at step 200 (5.3), 2.6 % shorter in one step (5.4)"),
    PaperPrint(LAST, 0.487, 0.723, 0.03, "48.7 to 72.3 % (5.2); which requests are the last"),
    PaperPrint(APART, 0.75, 0.75, 0.05, "33.4 % longer (5.4)", binding=False),
)
"""Prints, those first that are found out the fastest. The last one binds nobody: no point meets it
together with the others."""
Found = Mapping[str, float]
"""Figures of a point by the print's name, as far as they were looked for."""


def refuted(found: Found, prints: Sequence[PaperPrint] = PRINTS) -> PaperPrint | None:
    """The first binding print that these figures miss; those not looked for are not missed."""
    looked = (one for one in prints if one.binding and one.name in found)
    return next((one for one in looked if not one.met(found[one.name])), None)


class Spread(NamedTuple):
    """Values of the points that stand."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        """Raises ValueError where there is none: then nothing stands."""
        known = sorted(values)
        if not known:
            raise ValueError("no assumption meets what the paper prints: nothing follows")
        return cls(median(known), known[0], known[-1])
