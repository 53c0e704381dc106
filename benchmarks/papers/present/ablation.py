"""RhymeRL's parts and the systems beside it, with what it prints of them. Always labelled
SIMULATION."""

from collections.abc import Sequence

from rich.console import Console

from refrain.benchmarks.papers.generate import K
from refrain.benchmarks.papers.present.rows import PAPER, show_rows
from refrain.benchmarks.papers.rhymerl import BASELINE, PARTS, PipelineRow
from refrain.engines.reports.simulation import Ablation, Cell

PRINTED = dict(zip(PARTS, ("1.43", "1.10", "1.50"), strict=True))
"""RhymeRL 7.2.1, Math-14B. The paper does not say at which maximum."""
PRINTED_OVER = {
    "one_step_off": {8 * K: "1.9", 16 * K: "2.3"},
    "areal_1": {8 * K: "1.6", 16 * K: "1.8"},
    "areal_8": {8 * K: "1.3", 16 * K: "1.4"},
}
"""RhymeRL over each system (7.1), mean over models and tasks."""
COLUMNS = {
    "configuration": "",
    "samples_per_s": ",.1f",
    "step_s": ",.1f",
    "speedup": ".2f",
    PAPER: "",
    "total_speedup": ".2f",
    "rhymerl_over": ".2f",
    "paper_over": "",
    "idle_share": ".1%",
    "mean_staleness": ".2f",
    "largest_staleness": "",
    "intra_share": ".1%",
    "inter_share": ".1%",
}
NOTES = """\
Assumed, as the paper does not print it: prompts a step, spreads of lengths, training of 9 % of
an on-policy step on GPUs beside the engines', weights loaded in 0.23 s, no bound on the KV
cache; step times by a roofline.
Staleness: steps between the trained version and the oldest that generated.
Intra and inter share: migrated and deferred samples. The paper prints 2.2 to 5.5 % of both
(7.2.3).
HistoSpec: index, windows and gate of a run, on tokens made so that 93 % of them are in the
epoch before (5.1). No throughput was calibrated.
AReaL bounds how many samples are drawn, not how old they get. `kept` waits for samples that
would be older."""


def show_ablation(rows: Sequence[PipelineRow], console: Console) -> Ablation:
    """Print the rows, and return their figures."""
    for maximum in dict.fromkeys(row.max_response_tokens for row in rows):
        own = [row for row in rows if row.max_response_tokens == maximum]
        measured = own[0].result.measured
        title = f"rhymerl, overlapping steps {measured[0]} to {measured[-1]}: {maximum // K}K"
        told = (_json_row(row) | _beside(row, rows) for row in own)
        show_rows(title, told, COLUMNS, console)
    console.print(NOTES, soft_wrap=True)
    return Ablation(ablation_figures(rows), list(map(_json_row, rows)))


def _whole(rows: Sequence[PipelineRow], maximum: int) -> PipelineRow:
    """Return the row of all parts with this maximum."""
    own = (row for row in rows if row.max_response_tokens == maximum)
    return next(row for row in own if row.variant.part == PARTS[-1])


def ablation_figures(rows: Sequence[PipelineRow]) -> dict[str, float]:
    """Return figures by flat names. `migrated_share` is the largest of all parts."""
    figures: dict[str, float] = {}
    for row in rows:
        k = f"{row.max_response_tokens // K}k"
        part = str(row.variant.part).lower().replace("-", "_")
        if row.variant.part:
            figures[f"{part}_speedup_{k}"] = row.speedup
        if row.variant.part == PARTS[-1]:
            figures[f"total_speedup_{k}"] = row.total_speedup
        if system := row.variant.system:
            figures |= {f"{system}_{name}_{k}": x for name, x in _system(row, rows).items()}
    figures["migrated_share"] = max(row.result.migrated_share for row in rows if row.variant.part)
    return figures


def _system(row: PipelineRow, rows: Sequence[PipelineRow]) -> dict[str, float]:
    """Return a system's figures, and RhymeRL's speed-up over it."""
    whole = _whole(rows, row.max_response_tokens)
    return {
        "speedup": row.total_speedup,
        "rhymerl_over": whole.result.samples_per_s / row.result.samples_per_s,
        "idle_share": row.result.idle_share,
        "mean_staleness": row.result.mean_staleness,
        "largest_staleness": row.result.largest_staleness,
    }


def _json_row(row: PipelineRow) -> dict[str, Cell]:
    result = row.result
    return {
        "configuration": row.variant.name,
        "max_response_tokens": row.max_response_tokens,
        "over": row.variant.over or BASELINE,
        "speedup": row.speedup,
        "total_speedup": row.total_speedup,
        "samples_per_s": result.samples_per_s,
        "step_s": result.step_s,
        "tokens_per_s": result.tokens_per_s,
        "idle_share": result.idle_share,
        "mean_staleness": result.mean_staleness,
        "largest_staleness": result.largest_staleness,
        "intra_share": result.intra_share,
        "inter_share": result.inter_share,
    }


def _beside(row: PipelineRow, rows: Sequence[PipelineRow]) -> dict[str, Cell]:
    """Return what the paper prints of a part, and of RhymeRL over a system."""
    printed = PRINTED_OVER.get(row.variant.system or "", {})
    return {
        PAPER: PRINTED.get(row.variant.part or "", ""),
        "rhymerl_over": _system(row, rows)["rhymerl_over"],
        "paper_over": printed.get(row.max_response_tokens, ""),
    }
