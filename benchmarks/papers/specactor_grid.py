"""SpecActor over a grid of what drafters cost and how often they are right, at full size.

    point ─► coupled at 256 ─► coupled, all of it ─► all parts, last accepted ─► stands
                       └ missed: the next point

Coupled speculation brings less with a lower acceptance, so a column of the grid ends where it is
below what is printed.

Which prints a point must meet, and how nearly, says `benchmarks.papers.drafter_assumptions`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.papers.drafter_assumptions import (
    APART,
    AT_256,
    LAST,
    PRINTS,
    VANILLA,
    Assumption,
    Found,
    PaperPrint,
    refuted,
)
from benchmarks.papers.specactor import (
    BASELINE,
    COUPLED,
    DISAGGREGATED,
    ENDS,
    PARTS,
    RANKED,
    SpeculationRow,
    coupled_speedup,
    variants,
)
from benchmarks.papers.speculation_case import Case

WHOLE = PARTS[-1]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Brought:
    """Speed-ups at a point that stands."""

    speedup: float
    """All of SpecActor's parts over veRL."""
    over_coupled: float
    ranked: float
    """The same parts over veRL, with prompts placed by their lengths in the epoch before."""
    even_ends: float
    """The same with prompts placed so that engines end together, by the same lengths."""
    bound: float
    """Over veRL; no schedule exceeds it."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    """An assumption, and what was found of it until a print was missed."""

    assumed: Assumption
    found: Found
    brought: Brought | None = None
    """None: it does not stand."""


def simulate_grid(
    case: Case,
    grid: Iterable[Assumption],
    progress: Progress,
    prints: Sequence[PaperPrint] | None = None,
) -> list[GridPoint]:
    """Points in the order of the drafters' seconds, and of falling acceptance, as far as they were
    looked at. `prints`: None for the paper's."""
    columns: dict[float, list[Assumption]] = {}
    for assumed in sorted(grid, key=lambda point: (point.draft_scale, -point.acceptance)):
        columns.setdefault(assumed.draft_scale, []).append(assumed)
    look = Lookout(case, _row(case, BASELINE).step_s, prints or PRINTS, progress)
    return [point for column in columns.values() for point in look.down(column)]


@dataclass(frozen=True, slots=True)
class Lookout:
    """Everything that is the same at all points."""

    case: Case
    base_s: float
    """Seconds of veRL."""
    prints: Sequence[PaperPrint]
    progress: Progress

    def down(self, column: Iterable[Assumption]) -> Iterator[GridPoint]:
        """Points of falling acceptance, until coupled speculation brings too little."""
        for assumed in column:
            self.progress(f"drafting x {assumed.draft_scale:g}, p {assumed.acceptance:.2f}")
            point = self.at(assumed)
            yield point
            missed = refuted(point.found, self.prints)
            if missed and missed.name == VANILLA and point.found[VANILLA] < missed.low:
                return

    def at(self, assumed: Assumption) -> GridPoint:
        """A point, as far as it meets the prints."""
        case = self.case.assuming(assumed)
        found = {AT_256: coupled_speedup(case, 256)}
        if refuted(found, self.prints):
            return GridPoint(assumed, found)
        coupled_s = _row(case, COUPLED).step_s
        found[VANILLA] = self.base_s / coupled_s
        if refuted(found, self.prints):
            return GridPoint(assumed, found)
        whole = _row(case, WHOLE)
        found[LAST] = whole.last_rate or 0.0
        found[APART] = self.base_s / _row(case, DISAGGREGATED).step_s
        if refuted(found, self.prints):
            return GridPoint(assumed, found)
        brought = Brought(
            speedup=self.base_s / whole.step_s,
            over_coupled=coupled_s / whole.step_s,
            ranked=self.base_s / _row(case, f"{RANKED}, {WHOLE}").step_s,
            even_ends=self.base_s / _row(case, f"{ENDS}, {WHOLE}").step_s,
            bound=self.base_s / case.bound().seconds,
        )
        return GridPoint(assumed, found, brought)


def _row(case: Case, name: str) -> SpeculationRow:
    variant = next(one for one in variants(case) if one.name == name)
    return SpeculationRow("", variant, case.simulate(variant), 1.0, 1.0, None)
