"""Picture of a step's response lengths and of each drafter's acceptance rates."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from schemas.rollout import FinishReason

NUM_BINS = 40
LENGTH_COLOUR, CUT_COLOUR = "#2b6cb0", "#c0282d"
DRAFTER_COLOURS = ("#2f9e5f", "#7b3fa0", "#f5a300", "#00706b", "#c2007a")
"""Colours of the drafters, in the order of their names. Further drafters repeat them."""
WIDTH_IN, HEIGHT_IN, DPI = 10.0, 3.6, 100


@dataclass(frozen=True, slots=True)
class StepDistributions:
    """Response lengths and acceptance rates of the rollouts of one step."""

    lengths: np.ndarray
    """int64 [rollouts]: response tokens."""
    max_tokens: int
    """Length at which a response is cut."""
    num_cut: int
    acceptance: Mapping[str, np.ndarray]
    """Accepted / drafted tokens of each rollout, by drafter: float64 [rollouts with drafts]."""
    mean_acceptance: Mapping[str, float]
    """Accepted / drafted tokens of all rollouts, by drafter."""

    @property
    def median_tokens(self) -> float:
        return float(np.median(self.lengths)) if len(self.lengths) else 0.0


def step_distributions(rows: pa.Table, max_tokens: int) -> StepDistributions:
    """Return the distributions of a step's durable rows (`Store.timed_rollouts`)."""
    drafted = rows["num_draft_tokens"].to_numpy()
    accepted = rows["num_accepted_tokens"].to_numpy()
    names = np.asarray(rows["drafter"].to_pylist(), dtype=object)
    of = {name: (names == name) & (drafted > 0) for name in sorted(set(names[drafted > 0]))}
    return StepDistributions(
        lengths=rows["response_tokens"].to_numpy(),
        max_tokens=max_tokens,
        num_cut=rows["finish_reason"].to_pylist().count(FinishReason.LENGTH),
        acceptance={name: accepted[rows] / drafted[rows] for name, rows in of.items()},
        mean_acceptance={
            name: float(accepted[rows].sum() / drafted[rows].sum()) for name, rows in of.items()
        },
    )


def draw_distributions(distributions: StepDistributions, path: Path | str, title: str) -> None:
    """Draw a PNG: response lengths on the left, acceptance rates on the right."""
    figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN))
    lengths, acceptance = figure.subplots(1, 2)
    # Matplotlib's automatic layout would take longer than the drawing.
    figure.subplots_adjust(left=0.07, right=0.98, top=0.84, bottom=0.15, wspace=0.2)
    figure.suptitle(title, fontsize=11)
    _draw_lengths(lengths, distributions)
    _draw_acceptance(acceptance, distributions)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def _draw_lengths(axes: Axes, distributions: StepDistributions) -> None:
    num, cut, limit = len(distributions.lengths), distributions.num_cut, distributions.max_tokens
    axes.hist(
        distributions.lengths,
        bins=NUM_BINS,
        range=(0, limit),
        color=LENGTH_COLOUR,
        label="responses",
    )
    median = distributions.median_tokens
    axes.axvline(median, color="black", lw=1.5, label=f"median {median:g} tokens")
    share = f"{cut / num:.1%}" if num else "none"
    axes.axvline(limit, color=CUT_COLOUR, ls="--", label=f"cut at {limit} tokens: {cut} ({share})")
    axes.set_xlim(0, 1.03 * limit)
    _label(axes, "response tokens", f"lengths of {num} responses")


def _draw_acceptance(axes: Axes, distributions: StepDistributions) -> None:
    for i, (drafter, rates) in enumerate(distributions.acceptance.items()):
        colour = DRAFTER_COLOURS[i % len(DRAFTER_COLOURS)]
        mean = distributions.mean_acceptance[drafter]
        label = f"{drafter}: {mean:.0%} of tokens, {len(rates)} responses"
        axes.hist(
            rates, bins=NUM_BINS, range=(0, 1), color=colour, histtype="stepfilled", alpha=0.4
        )
        axes.axvline(mean, color=colour, lw=1.5, label=label)
    axes.set_xlim(0, 1)
    _label(axes, "accepted / drafted tokens of a response", "acceptance by drafter")
    if not distributions.acceptance:
        axes.text(0.5, 0.5, "nothing was drafted", ha="center", transform=axes.transAxes)


def _label(axes: Axes, x: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel("responses")
    axes.set_title(title, fontsize=10)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)
