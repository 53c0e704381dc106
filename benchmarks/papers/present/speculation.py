"""SpecActor's parts beside what it prints of them. Always labelled SIMULATION."""

from dataclasses import asdict

from rich.console import Console

from refrain.benchmarks.papers.present.rows import PAPER, show_rows
from refrain.benchmarks.papers.specactor import (
    COUPLED,
    DISAGGREGATED,
    ENDS,
    HEADS,
    PARTS,
    TOGETHER,
    WHOLE,
    SpeculationAblation,
    SpeculationRow,
)
from refrain.benchmarks.papers.speculation_case import Assumptions
from refrain.engines.reports.simulation import Ablation, Cell

PRINTED_GAINS = dict(zip(PARTS, (1.3, 1.2, 1.2), strict=True))
"""SpecActor 5.4, each over the part before it."""
PRINTED = {COUPLED: "1.03", DISAGGREGATED: "0.75", WHOLE: "2.0-2.4"}
"""Over veRL: 2.6 % less and 33.4 % longer (5.4), and of the whole (5.2)."""
COLUMNS = {
    "variant": "",
    "step_s": ",.1f",
    "speedup": ".2f",
    PAPER: "",
    "over_fair": ".2f",
    "over_coupled": ".2f",
    "gain": ".2f",
    "paper_gain": "",
    "last_rate": ".1%",
    "num_races_won": "",
}
GRID_COLUMNS = {
    "variant": "",
    "spread": ".2f",
    "launches": ".2f",
    "head": ".2f",
    "step_s": ",.1f",
    "speedup": ".2f",
    "over_fair": ".2f",
}
FOLLOWED = {
    WHOLE: "speculation",
    HEADS: "heads",
    ENDS: "even_ends_speculation",
    TOGETHER: "all_together",
}
"""Variants whose speed-ups over both kinds of veRL are figures."""
NOTES = """\
SIMULATION. Assumed, as the paper does not print it: lengths; draft times (1/6 ms of launches
for each layer); the acceptance of each request by each drafter, constant over a response.
Verifying is affine in batch and window, from weights, KV cache and FLOPs.
A gain is over the part before it, that of `decoupled` over `coupled`. The paper does not say
what its 33.4 % are longer than; veRL is taken.
Last rate: accepted of the drafts for the last hundredth of the rollouts. The paper prints 48.7
to 72.3 % with all its parts, and almost 0 with n-gram (5.2). Over coupled it prints 1.7 to 2.0.
Over fair: over veRL whose samples are dealt to the engines one by one.
Draft heads: an MLP and 32,000 rows of the output layer on the engine's GPUs, which draft in turn;
p is 0.69 for a typical response (2.5 tokens a step with 3 drafts).
Even ends: refrain places prompts by their lengths in the epoch before, so that engines end
together. With heads, 16 of the 256 GPUs have draft models that race."""


def show_speculation(ablation: SpeculationAblation, console: Console) -> Ablation:
    """Print the ablation, and return its figures."""
    plan = ablation.plan
    title = f"specactor, plan: {plan.num_drafters} drafters, {plan.num_engines} engines"
    show_rows(f"{title}, window {plan.window}", map(_told_row, ablation.rows), COLUMNS, console)
    console.print(
        f"SIMULATION coupled speculation with 256 requests: {ablation.coupled_at_256:.2f} of "
        'decoding here; paper: "no or negative speedup" (3, Fig. 6b)'
    )
    console.print(NOTES, soft_wrap=True)
    grid = [_grid_row(assumed, row) for assumed, row in ablation.grid.items()]
    show_rows("under other assumptions, over the above", grid, GRID_COLUMNS, console)
    return Ablation(speculation_figures(ablation), [*map(_json_row, ablation.rows), *grid])


def speculation_figures(ablation: SpeculationAblation) -> dict[str, float]:
    """Return figures by flat names."""
    figures = {"coupled_at_256": ablation.coupled_at_256}
    for row in ablation.rows:
        name = row.variant.name
        if row.gain is not None:
            figures[f"{name.lower().replace('-', '_')}_gain"] = row.gain
        if name in FOLLOWED:
            figures[f"{FOLLOWED[name]}_speedup"] = row.speedup
            figures[f"{FOLLOWED[name]}_over_fair_verl"] = row.over_fair
    return figures


def _json_row(row: SpeculationRow) -> dict[str, Cell]:
    moves = row.simulation.outcome.moves
    return {
        "variant": row.variant.name,
        "num_engines": row.variant.num_engines,
        "step_s": row.step_s,
        "speedup": row.speedup,
        "over_fair": row.over_fair,
        "over_coupled": row.over_coupled,
        "idle_share": row.simulation.step.idle_share,
        "last_rate": row.last_rate or 0.0,
        "num_raced": moves.num_raced,
        "num_races_won": moves.num_races_won,
        "wasted_tokens": moves.wasted_tokens,
    }


def _grid_row(assumed: Assumptions, row: SpeculationRow) -> dict[str, Cell]:
    times = {"step_s": row.step_s, "speedup": row.speedup, "over_fair": row.over_fair}
    return {"variant": row.variant.name, **asdict(assumed), **times}


def _told_row(row: SpeculationRow) -> dict[str, Cell]:
    """Return a row with what the paper prints."""
    name = row.variant.name
    printed = {PAPER: PRINTED.get(name, ""), "paper_gain": PRINTED_GAINS.get(name, "")}
    return _json_row(row) | printed | ({"gain": row.gain} if row.gain is not None else {})
