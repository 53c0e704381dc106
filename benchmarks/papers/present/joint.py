"""All techniques together beside each by itself. Always labelled SIMULATION."""

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.papers.joint import FREE, HINDSIGHT, JointRow
from benchmarks.papers.real_run import ALL, NOTHING
from engines.reports.simulation import Ablation
from engines.reports.tables import plain_table

TOLERANCE = 0.02
"""Share by which all together may be slower than the best single technique."""
NOTES = (
    "SIMULATION. All techniques of a run, beside each of them with the others switched off. The "
    "same requests, and the same is known beforehand: how long responses were in the epoch before.",
    "Over best: of all together over the fastest of the others, in PAT's settings each of these in "
    "the static TP degree that is the best with it.",
)


def show_joint(rows: Sequence[JointRow], console: Console) -> Ablation:
    """Printed, and what is found."""
    for setting in dict.fromkeys(row.joint_setting for row in rows):
        console.print(f"SIMULATION {setting}, all techniques together")
        console.print(_table([row for row in rows if row.joint_setting == setting]))
    for line in (*NOTES, *shortfalls(rows)):
        console.print(line, soft_wrap=True)
    json_rows = [asdict(row) | {"over_best_single": row.over_best_single or 0.0} for row in rows]
    return Ablation(joint_figures(rows), json_rows)


def shortfalls(rows: Sequence[JointRow]) -> list[str]:
    """Lines about settings in which all together are slower than a single technique."""
    return [
        f"slower than a single technique ({row.joint_setting}): {row.over_best_single:.3f}"
        + ("" if row.over_best_single >= 1 - TOLERANCE else ", beyond the tolerance")
        for row in rows
        if row.technique == ALL and row.over_best_single is not None and row.over_best_single < 1
    ]


def joint_figures(rows: Sequence[JointRow]) -> dict[str, float]:
    """`joint_over_best_single` of the first setting; the least and the most of all."""
    over = _over(rows, ALL)
    return {
        "joint_over_best_single": over[0],
        "joint_least_over_best_single": min(over),
        "joint_most_over_best_single": max(over),
        # Where there are static layouts to choose from, each technique has had the best of them.
        **({"joint_over_best_static": min(over)} if rows[0].of_best_static else {}),
        **({"joint_free_over_best_single": free[0]} if (free := _over(rows, FREE)) else {}),
        **({"joint_hindsight_over_best_single": h[0]} if (h := _over(rows, HINDSIGHT)) else {}),
    }


def _over(rows: Sequence[JointRow], technique: str) -> list[float]:
    return [
        row.over_best_single
        for row in rows
        if row.technique == technique and row.over_best_single is not None
    ]


def _table(rows: Sequence[JointRow]) -> Table:
    columns = ("technique", "seconds", f"over\n{NOTHING}", "over\nbest")
    table = plain_table(*columns, text=("technique",), min_width=16)
    for row in sorted(rows, key=lambda row: (row.technique == ALL, -row.seconds)):
        over = row.over_best_single
        seconds = f"{row.seconds:,.1f}"
        table.add_row(row.technique, seconds, f"{row.speedup:.2f}", f"{over:.3f}" if over else "")
    return table
