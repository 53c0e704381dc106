"""A paper's parts, and the systems it is compared with, beside what it prints of them. Always
labelled SIMULATION."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.papers.generate import K
from benchmarks.papers.rhymerl import BASELINE, PARTS, PipelineRow
from engines.reports.simulation import Ablation
from engines.reports.tables import plain_table

PRINTED = dict(zip(PARTS, ("1.43", "1.10", "1.50"), strict=True))
"""RhymeRL 7.2.1, Math-14B; it does not say at which maximum."""
PRINTED_OVER = {
    "one_step_off": {8 * K: "1.9", 16 * K: "2.3"},
    "areal_1": {8 * K: "1.6", 16 * K: "1.8"},
    "areal_8": {8 * K: "1.3", 16 * K: "1.4"},
}
"""7.1: RhymeRL over each, mean over models and tasks."""
STALE, MOVED = ("mean_staleness", "largest_staleness"), ("intra_share", "inter_share")
"""Other fields of a row of the JSON."""
NOTES = (
    "Assumed, as the paper does not print it: prompts a step, spreads of lengths, training of 9 % "
    "of an on-policy step on GPUs beside the engines', weights loaded in 0.23 s, no bound on the "
    "KV cache; step times by a roofline.",
    "Stale: steps between the version trained and the oldest that generated, mean and most.",
    "Moved: migrated and deferred, each sample once; the paper prints 2.2 to 5.5 % (16 groups, "
    "math) and 1.6 to 4.6 % (8 groups, code) in 7.2.3. These lengths are those of math.",
    "HistoSpec: index, windows and gate of a run, on tokens made so that 93 % of them are in the "
    "epoch before (5.1); no throughput was calibrated.",
    "The paper's speed-ups of its pipeline are over a baseline with a barrier, so they hold what "
    "overlapping brings by itself: `even, overlapping` shows that share here.",
    "AReaL's bound is on how many are drawn; `kept` waits for samples that would be older, as the "
    "others' bound is kept.",
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
    for line in (*NOTES, *shortfalls(rows), *comparisons(rows)):
        console.print(line, soft_wrap=True)
    return Ablation(ablation_figures(rows), list(map(_json_row, rows)))


def shortfalls(rows: Sequence[PipelineRow]) -> list[str]:
    """Lines about parts that bring less here than is printed, and simpler things that bring
    more."""
    lines = []
    for row in rows:
        part, case, name = row.variant.part, row.case, row.variant.name
        if part and row.speedup < float(PRINTED[part]):
            printed = f"{PRINTED[part]} printed"
            lines.append(f"below the paper ({case}): {name}, {row.speedup:.2f}, {printed}")
        if part and (simpler := _simpler(row, rows)):
            other = f"{simpler.variant.name} with {simpler.total_speedup:.2f}"
            lines.append(f"beaten ({case}): {name}, {row.total_speedup:.2f} in all, by {other}")
    return lines


def _simpler(row: PipelineRow, rows: Sequence[PipelineRow]) -> PipelineRow | None:
    """The fastest that is no part of the paper and drafts or not as this one does, if faster."""
    others = [
        other
        for other in rows
        if other.case == row.case
        and other.variant.part is None
        and other.variant.system is None
        and other.variant.drafting == row.variant.drafting
        and other.total_speedup > row.total_speedup
    ]
    return max(others, key=lambda other: other.total_speedup, default=None)


def comparisons(rows: Sequence[PipelineRow]) -> list[str]:
    """Lines about the whole of RhymeRL over each system, beside what is printed."""
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        of_case = [row for row in rows if row.case == case]
        whole = _whole(of_case)
        for row in of_case:
            if row.variant.system:
                printed = PRINTED_OVER.get(row.variant.system, {}).get(row.max_response_tokens)
                beside = f", {printed} printed" if printed else ""
                over = whole.result.samples_per_s / row.result.samples_per_s
                lines.append(f"over ({case}): {row.variant.name}, {over:.2f}{beside}")
    return lines


def _whole(rows: Sequence[PipelineRow]) -> PipelineRow:
    """All parts, with the first number of groups."""
    return next(row for row in rows if row.variant.part == PARTS[-1])


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
    return figures | _system_figures(rows)


def _system_figures(rows: Sequence[PipelineRow]) -> dict[str, float]:
    """Figures of each system: its samples/s over the baseline's, RhymeRL's over its, its idle share
    and the staleness of its samples."""
    figures: dict[str, float] = {}
    for row in rows:
        if not row.variant.system:
            continue
        suffix = f"_{row.max_response_tokens // K}k"
        if row.prompts_per_step != rows[0].prompts_per_step:
            suffix += f"_{row.prompts_per_step}_prompts"
        whole = _whole([other for other in rows if other.case == row.case])
        found = {
            "speedup": row.total_speedup,
            "rhymerl_over": whole.result.samples_per_s / row.result.samples_per_s,
            "idle_share": row.result.idle_share,
            "mean_staleness": row.result.mean_staleness,
            "largest_staleness": row.result.largest_staleness,
        }
        figures |= {f"{row.variant.system}_{name}{suffix}": value for name, value in found.items()}
    return figures


def _json_row(row: PipelineRow) -> dict[str, str | int | float]:
    measured = ("samples_per_s", "step_s", "tokens_per_s", "idle_share", *STALE, *MOVED)
    return {
        "configuration": row.variant.name,
        "prompts_per_step": row.prompts_per_step,
        "max_response_tokens": row.max_response_tokens,
        "over": row.variant.over or BASELINE,
        "speedup": row.speedup,
        "total_speedup": row.total_speedup,
        **{name: getattr(row.result, name) for name in measured},
    }


def _table(rows: Sequence[PipelineRow]) -> Table:
    columns = ("samples/s", "step s", "speed-up", "paper", "in all", "idle", "stale", "moved")
    first = "configuration"
    table = plain_table(first, *columns, text=(first,), gap=1, min_width=28)
    for row in rows:
        result, moved = row.result, row.result.migrated_share
        table.add_row(
            row.variant.name,
            f"{result.samples_per_s:,.1f}",
            f"{result.step_s:,.1f}",
            f"{row.speedup:.2f}",
            PRINTED.get(row.variant.part or "", ""),
            f"{row.total_speedup:.2f}",
            f"{result.idle_share:.1%}",
            f"{result.mean_staleness:.2f} {result.largest_staleness}",
            f"{moved:.1%}" if moved else "",
        )
    return table
