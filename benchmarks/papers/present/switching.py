"""PAT beside what it prints, and beside static TP degrees. Always labelled SIMULATION."""

import re
from collections.abc import Mapping

from rich.console import Console

from refrain.benchmarks.papers.pat import BEST, TP_DEGREES, Point
from refrain.benchmarks.papers.present.rows import PAPER, show_rows
from refrain.benchmarks.papers.switching import PRINTED_BASE, Comparison
from refrain.engines.reports.simulation import Ablation, Cell

COLUMNS = {
    "point": "",
    **{f"static_tp{tp}_s": ",.1f" for tp in TP_DEGREES[1:]},
    f"pat_from_tp{PRINTED_BASE}_s": ",.1f",
    "iteration_speedup": ".2f",
    f"iteration_speedup_over_tp{PRINTED_BASE}": ".2f",
    PAPER: "",
    "num_switches": ".1f",
}
NOTES = """\
SIMULATION. Assumed, as the paper does not print it: what is within a group of responses, and
tokens of a step on A40 (benchmarks/papers/pat.py). Step times are fitted to the eight times
that the paper prints.
Best static: the fastest TP degree throughout. PAT begins each step in TP 2, 4 or 8, by the
lengths of the epoch before.
Over TP 2: the paper does not name its static TP degrees. It switches from TP 2 (Fig. 12, 14),
and its printed seconds on H100 are those of TP 2 here.
A switch takes 3.16 s on A40 beside the KV cache (Fig. 12), and 2.20 s on H100, though parked
engines have nothing to reshard or capture."""
Comparisons = Mapping[Point, Comparison]


def show_switching(points: Comparisons, console: Console) -> Ablation:
    """Print the comparisons, and return their figures."""
    rows = [_row(point, found) for point, found in points.items()]
    told = (row | {PAPER: point.speedup or ""} for row, point in zip(rows, points, strict=True))
    show_rows("PAT: seconds of generation, speed-ups of an iteration", told, COLUMNS, console)
    console.print(NOTES, soft_wrap=True)
    return Ablation(switching_figures(points), rows)


def switching_figures(points: Comparisons) -> dict[str, float]:
    """Return figures by flat names, of `BEST` where the name has no point. Gains are over the best
    static TP degree unless the name says otherwise."""
    found = points[BEST]
    figures = {
        **_figures(found),
        "best_static_tp_degree": float(found.best_static),
        "best_static_s": found.static[found.best_static].seconds,
        f"static_tp{PRINTED_BASE}_s": found.static[PRINTED_BASE].seconds,
        "over_best_static": min(1 / (1 - of.over_best.reduction) for of in points.values()),
        f"over_tp{PRINTED_BASE}": min(of.over_printed.speedup for of in points.values()),
    }
    for point, comparison in points.items():
        if point != BEST:
            suffix = re.sub(r"\W+", "_", point.name.lower()).strip("_")
            figures |= {f"{name}_{suffix}": x for name, x in _figures(comparison).items()}
    return figures


def _figures(found: Comparison) -> dict[str, float]:
    gains = {"": found.over_best, f"_over_tp{PRINTED_BASE}": found.over_printed}
    return {
        f"{name}{over}": value
        for over, gain in gains.items()
        for name, value in zip(
            ("generation_reduction", "iteration_speedup"),
            (gain.reduction, gain.speedup),
            strict=True,
        )
    }


def _printed(point: Point) -> dict[str, float]:
    printed = {
        "printed_iteration_speedup": point.speedup,
        "printed_static_s": point.static_s,
        "printed_pat_s": point.pat_s,
    }
    return {name: value for name, value in printed.items() if value is not None}


def _row(point: Point, found: Comparison) -> dict[str, Cell]:
    return {
        "point": point.name,
        **_printed(point),
        "num_tokens": found.steps.num_tokens,
        **{f"static_tp{tp}_s": of.seconds for tp, of in found.static.items()},
        **{f"pat_from_tp{base}_s": of.seconds for base, of in found.pat.items()},
        "best_static_tp_degree": found.best_static,
        "best_base": found.best_base,
        **_figures(found),
        "num_switches": found.pat[PRINTED_BASE].num_switches,
    }
