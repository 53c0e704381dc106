"""The draft ladder of a profile for people: a table and a picture (SpecActor, figure 10 a)."""

from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from engines.latency.fitted import FittedLatency
from engines.specactor.ladder import Ladder
from schemas.drafting import HISTORY, NGRAM
from schemas.latency import PointKind, Profile, ProfilePoint

BATCHES = (1, 16, 64, 256)
ACCEPTANCES = (0.2, 0.4, 0.6, 0.8)
_LINE = tuple(round(share * 0.02, 2) for share in range(51))
_TICKS = (1, 2, 4, 8, 16, 32, 64)


class Rung(NamedTuple):
    """A row of the table."""

    batch: int
    drafter: str
    acceptance: float
    """Probability that a draft token is accepted."""
    window: int
    """The best one; 0: do not draft."""
    speedup: float
    """Over decoding."""


def profiled_ladder(profile: Profile) -> Ladder | None:
    """Draft ladder at the first TP degree and the median context that was verified; None without
    drafters.

    The history is on it wherever n-gram drafting is, whose times it has (`engines.latency.fitted`).
    """
    latency, points = FittedLatency(profile), _verified(profile)
    if not points or not latency.drafters:
        return None
    history = {HISTORY} if NGRAM in latency.drafters else set()
    return Ladder(
        latency,
        points[0].tp_degree,
        tuple(sorted(history.union(latency.drafters))),
        float(np.median([point.context_tokens / point.batch for point in points])),
        max(point.window for point in points),
    )


def verified_batches(profile: Profile) -> tuple[int, ...]:
    """Batch sizes that were verified at the first TP degree, ascending."""
    return tuple(sorted({point.batch for point in _verified(profile)}))


def ladder_rungs(profile: Profile) -> list[Rung]:
    """Rows of the table by batch, drafter and acceptance; empty without drafters."""
    ladder = profiled_ladder(profile)
    if ladder is None:
        return []
    return [
        Rung(batch, drafter, acceptance, *ladder.best(drafter, acceptance, batch))
        for batch in _shown_batches(profile)
        for drafter in ladder.drafters
        for acceptance in ACCEPTANCES
    ]


def ladder_table(rungs: list[Rung]) -> Table:
    """A line for each batch and drafter, a column for each acceptance of a token."""
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for column in ("gain (window)", "drafter", *(f"{share:.0%}" for share in ACCEPTANCES)):
        table.add_column(column)
    for (batch, drafter), line in groupby(rungs, key=lambda rung: (rung.batch, rung.drafter)):
        table.add_row(f"batch {batch}", drafter, *(_cell(rung) for rung in line))
    return table


def draw_ladder(profile: Profile, path: Path) -> None:
    """A panel for each batch: the best speed-up of every drafter over acceptance."""
    ladder, batches = profiled_ladder(profile), _shown_batches(profile)
    assert ladder is not None
    surfaces = ladder.surfaces(batches, _LINE)
    figure = Figure(figsize=(3.2 * len(batches), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for row, (batch, axes) in enumerate(zip(batches, panels, strict=True)):
        for drafter, surface in surfaces.items():
            # The history's line lies on that of n-gram drafting.
            look = {"ls": "--", "zorder": 3} if drafter == HISTORY else {}
            axes.plot(surface.acceptances, surface.speedups[row], label=drafter, **look)
        axes.set(title=f"batch {batch}", xlabel="acceptance of a token", xlim=(0, 1))
        axes.grid(alpha=0.3)
    # All panels share it.
    panels[0].set_yscale("log", base=2)
    panels[0].set_yticks(_TICKS, map(str, _TICKS))
    largest = max(surface.speedups.max() for surface in surfaces.values())
    panels[0].set(ylabel="best speed-up over decoding", ylim=(0.95, 1.05 * largest))
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{profile.model_name}, {profile.hardware}", fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _shown_batches(profile: Profile) -> list[int]:
    """Those of `BATCHES` that the profile has room for, or else its largest beside them."""
    smallest, *_, largest = verified_batches(profile)
    return sorted({min(max(batch, smallest), largest) for batch in BATCHES})


def _verified(profile: Profile) -> list[ProfilePoint]:
    """Points of verification at the first TP degree."""
    tp_degree = min(point.tp_degree for point in profile.of_kind(PointKind.DECODE))
    return [p for p in profile.of_kind(PointKind.VERIFY) if p.tp_degree == tp_degree]


def _cell(rung: Rung) -> str:
    return f"{rung.speedup:.2f} ({rung.window})" if rung.window else "no gain"
