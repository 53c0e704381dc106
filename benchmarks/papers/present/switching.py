"""PAT beside what it prints, and beside static TP degrees. Always labelled SIMULATION."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.papers.pat import STEP_TOKENS, TP_DEGREES, Point
from benchmarks.papers.present.lanes import LaneRow, LaneSpan, draw_lanes
from benchmarks.papers.scene import SceneRun
from benchmarks.papers.switching import PAT, PRINTED_BASE, Comparison, Runs
from benchmarks.papers.switching_study import BOUND, Rows, SwitchingStudy
from benchmarks.papers.uneven_layouts import UnevenRow
from engines.pat.layouts import place_engines, plan_pools
from engines.reports.simulation import Ablation
from engines.reports.tables import plain_table

LEAST_REDUCTION, LEAST_SPEEDUP = 0.346, 1.37
"""PAT 5.3, at its best point."""
PRINTED_FORECAST_ERRORS = {2: 0.0404, 8: 0.0307}
"""PAT 5.5, Fig. 14: of throughput, with lengths that are known."""
COLOURS = {"TP 1": "#8e5bb5", "TP 2": "#2b6cb0", "TP 4": "#3a9d5d", "TP 8": "#f5a300"}
NOTES = (
    "SIMULATION. Assumed, as the paper does not print it: what is within a group of responses, "
    "tokens of a step on A40; see benchmarks/papers/pat.py. What steps take is fitted to all eight "
    "times that it prints together (benchmarks/papers/pat_printed.py).",
    "Best static: the fastest TP degree throughout, as the paper tunes its baseline. PAT begins "
    "each step in TP 2, 4 or 8, by the lengths of the epoch before.",
    "Over TP 2: the paper does not name its static TP degrees, but those that it switches from "
    "(Fig. 12, 14) are 2, and its printed seconds on H100 are those of TP 2 here. On 16 A40 it "
    "gains less than over TP 2 here, as if it had begun higher there.",
    "Several TP degrees at once (TP 4 + 2 + 2): with lengths known, or by history, both with "
    "switches that take no time; ranked: no switch, split in hindsight. "
    "See benchmarks/papers/uneven_layouts.py.",
    "A switch takes 3.16 s on A40 and what keys and values take (Fig. 12), 2.20 s on H100, though "
    "engines that stand by have nothing to reshard or capture.",
)


def show_switching(study: SwitchingStudy, out: Path, console: Console) -> Ablation:
    """Printed, drawn, and what is found."""
    console.print("SIMULATION PAT, seconds of generation with static TP degrees")
    console.print(_static_table(study.points))
    console.print("SIMULATION PAT, generation and iteration; paper: of an iteration")
    console.print(_pat_table(study.points))
    for line in _switch_lines(study):
        console.print(line, soft_wrap=True)
    console.print("SIMULATION PAT, its parts")
    console.print(_ablation_table(study))
    console.print(f"SIMULATION PAT at {study.best.name}, if something assumed were different")
    console.print(_sensitivity_table(study.sensitivity))
    console.print("SIMULATION PAT, error of forecasts of the seconds left, by lengths")
    console.print(_forecast_table(study))
    console.print(f"SIMULATION switches with uniform lengths: {study.uniform_switches}; paper: 0")
    console.print(
        "SIMULATION PAT, layouts of several TP degrees at once, by the latency model alone"
    )
    console.print(_uneven_table(study.uneven))
    for line in (*_printed_lines(study.printed), *NOTES, *shortfalls(study)):
        console.print(line, soft_wrap=True)
    _draw(study, out / "switching.png")
    return Ablation(switching_figures(study), _json_rows(study))


def shortfalls(study: SwitchingStudy) -> list[str]:
    """Lines about what is less here than printed, and which static TP degree is in the way."""
    found, lines = study.points[study.best], []
    best, gain, over_printed = found.best_static, found.over_best, found.over_printed
    if gain.reduction < LEAST_REDUCTION:
        lines += [
            f"below the paper ({study.best.name}): generation is {gain.reduction:.1%} shorter "
            f"than with the best static TP degree, not {LEAST_REDUCTION:.1%}, and "
            f"{over_printed.reduction:.1%} shorter than with TP {PRINTED_BASE}",
            f"in the way: static TP {best}, {found.static[best].seconds:.1f} s. What is printed of "
            f"the best one, {study.best.static_s} s, is what TP {PRINTED_BASE} takes here, "
            f"{found.static[PRINTED_BASE].seconds:.1f} s; of PAT {study.best.pat_s} s are printed",
        ]
    if gain.speedup < LEAST_SPEEDUP:
        lines.append(
            f"below the paper ({study.best.name}): {gain.speedup:.2f} over the best static TP "
            f"degree, not {LEAST_SPEEDUP}, and {over_printed.speedup:.2f} over TP {PRINTED_BASE}"
        )
    return lines


def switching_figures(study: SwitchingStudy) -> dict[str, float]:
    """Flat names; of the best point where none is named. Without a suffix: over the best static TP
    degree."""
    found = study.points[study.best]
    figures = {
        **_figures(found),
        "best_static_tp_degree": float(found.best_static),
        "best_static_s": found.static[found.best_static].seconds,
        f"static_tp{PRINTED_BASE}_s": found.static[PRINTED_BASE].seconds,
        "uniform_switches": float(study.uniform_switches),
        "over_best_static": min(
            1 / (1 - found.over_best.reduction) for found in study.points.values()
        ),
        f"over_tp{PRINTED_BASE}": min(
            found.over_printed.speedup for point, found in study.points.items() if point.speedup
        ),
        "largest_residual": max(abs(row["residual"]) for row in study.printed if "residual" in row),
    }
    for kind in dict.fromkeys(row.uneven for row in study.uneven):
        over = max(row.over_even for row in study.uneven if row.uneven == kind)
        figures[f"uneven_over_even_{kind}"] = over
    for point in dict.fromkeys(point for point, _ in study.ablation):
        gain = study.points[point].over_base(study.ablation[point, BOUND])
        figures[f"over_tp{PRINTED_BASE}_bound_{_flat(point.name)}"] = gain.speedup
    for point, comparison in study.points.items():
        if point != study.best and point.speedup is not None:
            suffix = f"_{_flat(point.name)}"
            figures |= {f"{name}{suffix}": value for name, value in _figures(comparison).items()}
    for (point, tp_degree, lengths), error in study.forecasts.items():
        suffix = "" if point == study.best else f"_{_flat(point.name)}"
        figures[f"forecast_error_{lengths}_tp{tp_degree}{suffix}"] = error
    return figures


def _json_rows(study: SwitchingStudy) -> list[dict[str, str | int | float]]:
    points = [{"point": p.name, **_printed(p), **_row(c)} for p, c in study.points.items()]
    parts = [
        {
            "point": point.name,
            "variant": variant.name,
            "pat_s": runs.seconds,
            "over_pat": runs.seconds / study.ablation[point, PAT].seconds,
            **_switches(runs),
        }
        for (point, variant), runs in study.ablation.items()
    ]
    changed = [
        {"point": study.best.name, "change": name, **_row(c)}
        for name, c in study.sensitivity.items()
    ]
    uneven = [asdict(row) | {"over_even": row.over_even} for row in study.uneven]
    return [*points, *parts, *changed, *uneven, *study.printed]


def _draw(study: SwitchingStudy, path: Path) -> None:
    """Picture of the first step of the last point whose parts are taken away."""
    *_, (point, _) = study.ablation
    found = study.points[point]
    best, base = found.best_static, PRINTED_BASE
    rows = {f"static TP {tp}": found.static[tp].runs[0] for tp in dict.fromkeys((base, best))}
    rows["PAT"] = found.pat[base].runs[0]
    lanes = tuple(range(point.num_gpus))
    drawn = [LaneRow(name, lanes, tuple(_spans(run))) for name, run in rows.items()]
    title = f"SIMULATION {point.name}: which TP degree has which GPUs"
    draw_lanes(drawn, path, title, lane="GPU", known=COLOURS)


def _spans(run: SceneRun) -> Iterator[LaneSpan]:
    rollout, pat = run.scene.config.rollout, run.scene.config.pat
    _, specs = plan_pools(rollout.num_engines, rollout.tp_degree, pat.tp_degrees, pat.gpus_per_node)
    gpus = place_engines(specs)
    for spec in specs:
        for at in run.timelines[spec.engine]:
            for gpu in gpus[spec.engine]:
                yield LaneSpan(gpu, at.start_s, at.end_s, at.batch, f"TP {spec.tp_degree}")


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


def _row(found: Comparison) -> dict[str, str | int | float]:
    static = {f"static_tp{tp}_s": runs.seconds for tp, runs in found.static.items()}
    pat = {f"pat_from_tp{base}_s": runs.seconds for base, runs in found.pat.items()}
    return {
        "num_tokens": found.steps.num_tokens,
        **static,
        **pat,
        "best_static_tp_degree": found.best_static,
        "best_base": found.best_base,
        **_figures(found),
        **_switches(found.pat[PRINTED_BASE]),
    }


def _switches(runs: Runs) -> dict[str, float]:
    return {name: getattr(runs, name) for name in ("num_switches", "switch_s", "moved_share")}


def _static_table(points: Mapping[Point, Comparison]) -> Table:
    table = _table("point", *(f"TP {tp}" for tp in TP_DEGREES), "paper", "tokens", "paper")
    for point, found in points.items():
        max_tokens, printed_tokens = STEP_TOKENS[point.model]
        is_printed = (point.hardware, point.max_tokens) == ("H100", max_tokens)
        table.add_row(
            point.name,
            *(_static_cell(found, tp) for tp in TP_DEGREES),
            f"{point.static_s}" if point.static_s else "",
            f"{found.steps.num_tokens:,.0f}",
            f"{printed_tokens:,.0f}" if is_printed else "",
        )
    return table


def _static_cell(found: Comparison, tp_degree: int) -> str:
    """The best one has a star; one that does not fit is left out."""
    if tp_degree not in found.static:
        return ""
    star = "*" if tp_degree == found.best_static else ""
    return f"{found.static[tp_degree].seconds:,.1f}{star}"


def _pat_table(points: Mapping[Point, Comparison]) -> Table:
    over = ("PAT", "begins\nin TP", "over\nbest", "itera-\ntion")
    fixed = ("over\nTP 2", "itera-\ntion", "paper", "swit-\nches", "they\ntake")
    table = _table("point", *over, *fixed)
    for point, found in points.items():
        runs = found.pat[PRINTED_BASE]
        table.add_row(
            point.name,
            *_best_cells(found),
            f"{found.over_best.speedup:.2f}",
            _change(found.over_printed.reduction),
            f"{found.over_printed.speedup:.2f}",
            f"{point.speedup}" if point.speedup else "",
            f"{runs.num_switches:.1f}",
            f"{runs.switch_s:.1f} s",
        )
    return table


def _switch_lines(study: SwitchingStudy) -> Iterator[str]:
    """Lines about switches in the first step of each point, from the printed base."""
    for point, found in study.points.items():
        switches = found.pat[PRINTED_BASE].runs[0].switches
        told = (
            f"at {s.at_s:.0f} s to TP {s.move.tp_degree} with {s.num_unfinished} left "
            f"({'moved' if s.move.move_kv else 'recomputed'}, {s.seconds:.1f} s)"
            for s in switches
            if s.move.pool == 0
        )
        yield f"SIMULATION {point.name}, first node and step: {'; '.join(told) or 'no switch'}"


def _printed_lines(rows: Rows) -> Iterator[str]:
    for row in rows:
        if "residual" in row:
            yield f"SIMULATION fitted to {row['printed']}: {row['residual']:+.1%}"
        else:
            yield (
                f"by what is printed alone, 8 A40, {row['printed_bound_k']}K: at most "
                f"{row['most_over_static']:.3f} over the best static TP degree"
            )


def _ablation_table(study: SwitchingStudy) -> Table:
    table = _table("point", "variant", "s", "over PAT", "switches", "they take", "moved")
    for (point, variant), runs in study.ablation.items():
        table.add_row(
            point.name,
            variant.name,
            f"{runs.seconds:,.1f}",
            f"{runs.seconds / study.ablation[point, PAT].seconds:.3f}",
            f"{runs.num_switches:.1f}",
            f"{runs.switch_s:.1f} s",
            f"{runs.moved_share:.0%}",
        )
    return table


def _sensitivity_table(sensitivity: Mapping[str, Comparison]) -> Table:
    static = (f"TP {tp}" for tp in TP_DEGREES)
    table = _table("change", "tokens", *static, "PAT", "begins\nin TP", "over\nbest", "over\nTP 2")
    for name, found in sensitivity.items():
        table.add_row(
            name,
            f"{found.steps.num_tokens:,.0f}",
            *(_static_cell(found, tp) for tp in TP_DEGREES),
            *_best_cells(found),
            _change(found.over_printed.reduction),
        )
    return table


def _best_cells(found: Comparison) -> tuple[str, str, str]:
    runs = found.pat[found.best_base]
    degrees = sorted({degree for run in runs.runs for degree in run.begun.values()})
    begun = ", ".join(map(str, degrees))
    return f"{runs.seconds:,.1f}", begun, _change(found.over_best.reduction)


def _forecast_table(study: SwitchingStudy) -> Table:
    table = _table("point", "TP", "known", "history", "maximum", "paper, known")
    for point, tp_degree in dict.fromkeys(key[:2] for key in study.forecasts):
        found = [error for key, error in study.forecasts.items() if key[:2] == (point, tp_degree)]
        errors = (*found, PRINTED_FORECAST_ERRORS[tp_degree])
        table.add_row(point.name, f"{tp_degree}", *(f"{error:.2%}" for error in errors))
    return table


def _uneven_table(rows: Sequence[UnevenRow]) -> Table:
    table = _table("point", "drafts", "lengths", "one degree", "several", "ratio")
    for row in rows:
        seconds = (f"{row.even_s:,.1f} s", f"{row.uneven_s:,.1f} s", f"{row.over_even:.2f}")
        table.add_row(row.point, "yes" if row.drafts else "no", row.uneven, *seconds)
    return table


def _table(*columns: str) -> Table:
    return plain_table(*columns, text=(columns[0], "variant"), gap=1, min_width=16)


def _change(reduction: float) -> str:
    return f"{0.0 - reduction:+.1%}"


def _flat(name: str) -> str:
    return re.sub(r"\W+", "_", name.lower()).strip("_")
