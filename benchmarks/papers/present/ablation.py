"""A paper's parts beside what it prints of them. Always labelled SIMULATION."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.papers.rhymerl import BASELINE, PARTS, PipelineRow
from benchmarks.papers.windows import ACCEPTANCE
from engines.reports.simulation import Ablation
from engines.reports.tables import plain_table

PRINTED = dict(zip(PARTS, ("1.43", "1.10", "1.50"), strict=True))
"""RhymeRL 7.2.1, Math-14B; it does not say at which maximum."""
PRINTED_TOTAL = {8192: "1.9", 16384: "2.3"}
"""7.1: over veRL, mean over models and tasks."""
NOTES = (
    "Assumed, as the paper does not print it: prompts a step, spreads of lengths, training hidden "
    "(0 s), weights loaded in 0.23 s, no bound on the KV cache; step times by a roofline.",
    "Moved: migrated and deferred, each sample once; the paper prints 2.2 to 5.5 % (16 groups, "
    "math) and 1.6 to 4.6 % (8 groups, code) in 7.2.3. These lengths are those of math.",
    f"HistoSpec: every draft token accepted with p = {ACCEPTANCE}, every step has one: no "
    "throughput was calibrated, and misses and bursts of matches are not modelled.",
    "The paper's speed-ups of its pipeline are over a baseline with a barrier, so they hold what "
    "overlapping brings by itself: `even, overlapping` shows that share here.",
)


def show_ablation(rows: Sequence[PipelineRow], console: Console) -> Ablation:
    """Printed, and what is found."""
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        measured = of_case[0].result.measured
        console.print(
            f"SIMULATION rhymerl, overlapping steps {measured[0]} to {measured[-1]}: {case}"
        )
        console.print(_table(of_case))
    for line in (*NOTES, *shortfalls(rows)):
        console.print(line, soft_wrap=True)
    return Ablation(ablation_figures(rows), list(map(_json_row, rows)))


def shortfalls(rows: Sequence[PipelineRow]) -> list[str]:
    """Lines about parts that bring less here than is printed, and simpler things that bring
    more."""
    lines = []
    for row in rows:
        part, case, name = row.variant.part, row.case, row.variant.configuration.name
        if part and row.speedup < float(PRINTED[part]):
            printed = f"{PRINTED[part]} printed"
            lines.append(f"below the paper ({case}): {name}, {row.speedup:.2f}, {printed}")
        if part and (simpler := _simpler(row, rows)):
            other = f"{simpler.variant.configuration.name} with {simpler.total_speedup:.2f}"
            lines.append(f"beaten ({case}): {name}, {row.total_speedup:.2f} in all, by {other}")
    return lines


def _simpler(row: PipelineRow, rows: Sequence[PipelineRow]) -> PipelineRow | None:
    """The fastest that is no part of the paper and drafts or not as this one does, if faster."""
    drafts = row.variant.configuration.drafting
    others = [
        other
        for other in rows
        if other.case == row.case
        and other.variant.part is None
        and other.variant.configuration.drafting == drafts
        and other.total_speedup > row.total_speedup
    ]
    return max(others, key=lambda other: other.total_speedup, default=None)


def ablation_figures(rows: Sequence[PipelineRow]) -> dict[str, float]:
    """Flat names. Without a suffix: the first number of prompts a step and of ranking groups, the
    largest maximum; `migrated_share` is the largest of all that move."""
    parts = [row for row in rows if row.variant.part]
    first, largest = parts[0], max(row.max_response_tokens for row in rows)
    figures: dict[str, float] = {}
    for row in parts:
        part, suffix = str(row.variant.part).lower().replace("-", "_"), ""
        if row.variant.num_groups != first.variant.num_groups:
            suffix += f"_{row.variant.num_groups}_groups"
        if row.prompts_per_step != first.prompts_per_step:
            suffix += f"_{row.prompts_per_step}_prompts"
        figures[f"{part}_speedup_{row.max_response_tokens // 1024}k{suffix}"] = row.speedup
        if not suffix and row.max_response_tokens == largest:
            figures[f"{part}_speedup"] = row.speedup
        if row.variant.part == PARTS[-1]:
            name = f"total_speedup_{row.max_response_tokens // 1024}k{suffix}"
            figures[name] = row.total_speedup
    figures["migrated_share"] = max(row.result.migrated_share for row in parts)
    return figures


def _json_row(row: PipelineRow) -> dict[str, str | int | float]:
    measured = ("samples_per_s", "tokens_per_s", "idle_share", "intra_share", "inter_share")
    return {
        "configuration": row.variant.configuration.name,
        "prompts_per_step": row.prompts_per_step,
        "max_response_tokens": row.max_response_tokens,
        "over": row.variant.over or BASELINE,
        "speedup": row.speedup,
        "total_speedup": row.total_speedup,
        **{name: getattr(row.result, name) for name in measured},
    }


def _table(rows: Sequence[PipelineRow]) -> Table:
    columns = ("samples/s", "speed-up", "paper", "in all", "paper", "idle", "moved")
    first = "configuration"
    table = plain_table(first, *columns, text=(first,), gap=1, min_width=28)
    for row in rows:
        variant, last = row.variant, row.variant.part == PARTS[-1]
        moved = row.result.migrated_share
        table.add_row(
            variant.configuration.name,
            f"{row.result.samples_per_s:,.1f}",
            f"{row.speedup:.2f}",
            PRINTED.get(variant.part or "", ""),
            f"{row.total_speedup:.2f}",
            PRINTED_TOTAL.get(row.max_response_tokens, "") if last else "",
            f"{row.result.idle_share:.1%}",
            f"{moved:.1%}" if moved else "",
        )
    return table
