"""Assumptions about SpecActor's drafters beside what it prints, and what follows from those that
stand. Always labelled SIMULATION."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.papers.drafter_assumptions import PRINTS, PaperPrint, Spread
from benchmarks.papers.specactor_grid import Brought, GridPoint
from engines.reports.simulation import Ablation
from engines.reports.tables import plain_table

ASKED: Mapping[str, Callable[[Brought], float]] = {
    "rollout_speedup": lambda of: of.speedup,
    "over_coupled": lambda of: of.over_coupled,
    "ranked_rollout_speedup": lambda of: of.ranked,
    "even_ends_rollout_speedup": lambda of: of.even_ends,
    "grid_bound_speedup": lambda of: of.bound,
}
"""Figures by name."""
PRINTED = {"rollout_speedup": "2.0 to 2.4", "over_coupled": "1.7 to 2.0"}
"""SpecActor 5.2."""
NOTES = (
    "SIMULATION. Every point of the grid is a scale of the drafters' seconds and an acceptance; "
    "it stands where it meets each print within its tolerance. Figures are medians of the points "
    "that stand, with the least and the most.",
    "A print that does not bind is shown beside the others: in the layout that is planned, naive "
    "disaggregation gives a fifth of the engines away, which is less than the paper loses by it.",
)


def show_grid(points: Sequence[GridPoint], console: Console) -> Ablation:
    """Printed, and what is found."""
    standing = [point for point in points if point.brought]
    console.print(
        f"SIMULATION {len(points)} assumptions looked at, {len(standing)} meet what is printed"
    )
    console.print(_prints_table(points, standing))
    if not standing:
        console.print("no assumption meets what the paper prints: nothing follows")
        return Ablation({"standing_points": 0.0}, list(map(_json_point, points)))
    console.print(_points_table(standing))
    spreads = grid_spreads(standing)
    console.print(_spreads_table(spreads))
    for line in NOTES:
        console.print(line, soft_wrap=True)
    rows = [{"figure": name, **spread._asdict()} for name, spread in spreads.items()]
    figures = {name: spread.median for name, spread in spreads.items()}
    figures["standing_points"] = float(len(standing))
    return Ablation(figures, [*rows, *map(_json_point, points)])


def grid_spreads(standing: Sequence[GridPoint]) -> dict[str, Spread]:
    """Spreads by figure, of at least one point."""
    brought = [point.brought for point in standing if point.brought]
    return {figure: Spread.of(map(ask, brought)) for figure, ask in ASKED.items()}


def _json_point(point: GridPoint) -> dict[str, str | int | float]:
    found = {name.replace(" ", "_"): value for name, value in point.found.items()}
    return {**point.assumed._asdict(), **found, "stands": int(point.brought is not None)}


def _prints_table(points: Sequence[GridPoint], standing: Sequence[GridPoint]) -> Table:
    columns = ("print", "printed", "points\nthat meet it", "here, of those\nthat stand", "binds")
    table = plain_table(*columns, text=("print", "printed", "binds"), min_width=16)
    for one in PRINTS:
        found = [point.found[one.name] for point in points if one.name in point.found]
        met = sum(map(one.met, found))
        table.add_row(
            one.name, one.printed, f"{met} of {len(found)}", _range(one, standing), _binds(one)
        )
    return table


def _range(one: PaperPrint, standing: Sequence[GridPoint]) -> str:
    if not standing:
        return ""
    spread = Spread.of(point.found[one.name] for point in standing)
    return f"{spread.least:.2f} to {spread.most:.2f}"


def _binds(one: PaperPrint) -> str:
    return "yes" if one.binding else "no"


def _points_table(standing: Sequence[GridPoint]) -> Table:
    names = [one.name for one in PRINTS]
    columns = ("drafters'\nseconds", "p", *(name.replace(" ", "\n") for name in names))
    table = plain_table(*columns, "over\nveRL", "over\ncoupled", "ranked", "even\nends", "bound")
    for point in standing:
        of = point.brought
        assert of
        found = (point.found[name] for name in names)
        told = (*found, of.speedup, of.over_coupled, of.ranked, of.even_ends, of.bound)
        scale, p = f"x {point.assumed.draft_scale:g}", f"{point.assumed.acceptance:.2f}"
        table.add_row(scale, p, *(f"{value:.2f}" for value in told))
    return table


def _spreads_table(spreads: Mapping[str, Spread]) -> Table:
    table = plain_table("figure", "median", "least", "most", "paper", text=("figure", "paper"))
    for name, spread in spreads.items():
        table.add_row(name, *(f"{value:.2f}" for value in spread), PRINTED.get(name, ""))
    return table
