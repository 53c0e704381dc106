"""Show a profile as tables in the terminal and as pictures. Both include its draft ladder
(SpecActor, figure 10 a)."""

from collections import defaultdict
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from refrain.engines.latency.fitted import FittedLatency
from refrain.engines.specactor.ladder import Ladder, SpeedupSurface
from refrain.schemas.drafting import HISTORY, NGRAM, TEXT_DRAFTERS
from refrain.schemas.latency import PointKind, Profile, ProfilePoint
from refrain.schemas.profile import ProfileReport

_ACCEPTANCES = tuple(round(share * 0.05, 2) for share in range(1, 21))
BATCHES = (1, 16, 64, 256)
ACCEPTANCES = (0.2, 0.4, 0.6, 0.8)
_LINE = tuple(round(share * 0.02, 2) for share in range(51))
_TICKS = (1, 2, 4, 8, 16, 32, 64)


class Rung(NamedTuple):
    """Row of the ladder's table."""

    batch: int
    drafter: str
    acceptance: float
    """Probability that a draft token is accepted."""
    window: int
    """Best draft window. 0: drafting does not pay."""
    speedup: float
    """Speed-up over decoding without drafts."""


def print_profile(report: ProfileReport) -> None:
    """Print the measured points, the error of the fit, and the batches where drafting pays."""
    console, profile = Console(highlight=False), report.profile
    links = f", shards with the links of {profile.links}" if profile.links else ""
    console.print(
        f"{profile.model_name} ({profile.dtype}) on {profile.hardware}{links}: "
        f"{len(profile.points)} points, KV cache of {profile.max_active_tokens:,} tokens"
    )
    columns = ("error of the fit", "withheld", "points", "median", "90 %")
    table = Table(*columns, box=None, padding=(0, 2), header_style="bold")
    for what, accuracies in (
        ("points of a curve", report.held_out),
        ("a whole batch size", report.between_batches),
    ):
        for accuracy in accuracies:
            errors = (f"{accuracy.median_error:.1%}", f"{accuracy.p90_error:.1%}")
            table.add_row(accuracy.kind.value, what, str(accuracy.num_points), *errors)
    console.print(table)
    for line in paying_lines(profile):
        console.print(line)
    if rungs := ladder_rungs(profile):
        console.print(ladder_table(rungs))
    console.print(f"profile: {report.profile_file}", soft_wrap=True)


def paying_lines(profile: Profile) -> list[str]:
    """Return a line per drafter: the largest batch where it pays, at a few acceptance rates."""
    lines = []
    for drafter, surface in _surfaces(profile).items():
        largest = [(surface.max_paying_batch(p), p) for p in (0.3, 0.5, 0.7, 0.9)]
        words = [f"{f'batch {batch}' if batch else 'no batch'} at {p:.0%}" for batch, p in largest]
        lines.append(f"drafting with {drafter} pays up to {', '.join(words)} acceptance")
    return lines


def draw_profile(report: ProfileReport) -> list[Path]:
    """Draw the pictures beside the profile, and return their files."""
    directory, profile = report.profile_file.parent, report.profile
    pictures = [directory / "decode.png", directory / "prefill.png"]
    draw_curves(profile, PointKind.DECODE, pictures[0])
    draw_curves(profile, PointKind.PREFILL, pictures[1])
    for drafter, surface in _surfaces(profile).items():
        pictures.append(directory / f"speedup-{drafter}.png")
        draw_speedup(surface, drafter, pictures[-1])
    if ladder_rungs(profile):
        pictures.append(directory / "ladder.png")
        draw_ladder(profile, pictures[-1])
    return pictures


def draw_curves(profile: Profile, kind: PointKind, path: Path) -> None:
    """Draw measured points and the fit, with one curve per TP degree and batch size."""
    latency = FittedLatency(profile)
    at: Callable[[int, int, float], float]
    if kind is PointKind.DECODE:
        at, x_label, y_label = latency.decode_s, "context of all sequences, tokens", "step, ms"
    else:
        at, x_label, y_label = latency.prefill_s, "RMS prompt length, tokens", "prefill, ms"
    curves: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for point in profile.of_kind(kind):
        x = point.rms_tokens or point.context_tokens
        curves[point.tp_degree, point.batch].append((x, point.seconds))
    figure, axes = _axes(x_label, y_label, f"{profile.model_name}, {profile.hardware}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    for (tp_degree, batch), points in sorted(curves.items()):
        xs, seconds = np.array(sorted(points)).T
        label = f"TP {tp_degree}, batch {batch}" if len(latency.tp_degrees) > 1 else str(batch)
        line = np.geomspace(xs[0], xs[-1], 100)
        (drawn,) = axes.plot(line, [at(tp_degree, batch, x) * 1e3 for x in line], label=label)
        axes.plot(xs, seconds * 1e3, ".", color=drawn.get_color())
    axes.legend(title="batch", fontsize="small", ncols=2)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_speedup(surface: SpeedupSurface, drafter: str, path: Path) -> None:
    """Draw the speed-up of the best window over batch and acceptance rate. The white line marks
    where drafting stops paying."""
    figure, axes = _axes("batch", "acceptance", f"best speed-up of drafting with {drafter}")
    axes.set_xscale("log", base=2)
    grid = (surface.batches, surface.acceptances, surface.speedups.T)
    image = axes.pcolormesh(*grid, shading="nearest", vmin=1.0)
    if surface.speedups.min() <= 1.0 < surface.speedups.max():
        axes.contour(*grid, levels=[1.0 + 1e-9], colors="white")
    figure.colorbar(image, label="tokens/s over decoding")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def profiled_ladder(profile: Profile) -> Ladder | None:
    """Return the draft ladder at the first TP degree and the median verified context. Each draft
    model has a process for every engine. Return None without drafters.

    The history is on the ladder if n-gram drafting is, because both take the same time
    (`engines.latency.fitted`).
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
        ahead={name: 1 for name in latency.drafters if name not in TEXT_DRAFTERS},
    )


def verified_batches(profile: Profile) -> tuple[int, ...]:
    """Return the batch sizes with verification points at the first TP degree, ascending."""
    return tuple(sorted({point.batch for point in _verified(profile)}))


def ladder_rungs(profile: Profile) -> list[Rung]:
    """Return the table's rows by batch, drafter and acceptance rate. Empty without drafters."""
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
    """Return a table with a line per batch and drafter, and a column per acceptance rate."""
    columns = ("gain (window)", "drafter", *(f"{share:.0%}" for share in ACCEPTANCES))
    table = Table(*columns, box=None, padding=(0, 2), header_style="bold")
    for (batch, drafter), line in groupby(rungs, key=lambda rung: (rung.batch, rung.drafter)):
        table.add_row(f"batch {batch}", drafter, *(_cell(rung) for rung in line))
    return table


def draw_ladder(profile: Profile, path: Path) -> None:
    """Draw a panel per batch: the best speed-up of each drafter over the acceptance rate."""
    ladder, batches = profiled_ladder(profile), _shown_batches(profile)
    assert ladder is not None
    surfaces = ladder.surfaces(batches, _LINE)
    figure = Figure(figsize=(3.2 * len(batches), 3.6), layout="constrained")
    panels = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for row, (batch, axes) in enumerate(zip(batches, panels, strict=True)):
        for drafter, surface in surfaces.items():
            # Dash the history's line, because n-gram drafting's line lies below it.
            look = {"ls": "--", "zorder": 3} if drafter == HISTORY else {}
            axes.plot(surface.acceptances, surface.speedups[row], label=drafter, **look)
        axes.set(title=f"batch {batch}", xlabel="acceptance of a token", xlim=(0, 1))
        axes.grid(alpha=0.3)
    # The panels share this y axis.
    panels[0].set_yscale("log", base=2)
    panels[0].set_yticks(_TICKS, map(str, _TICKS))
    largest = max(surface.speedups.max() for surface in surfaces.values())
    panels[0].set(ylabel="best speed-up over decoding", ylim=(0.95, 1.05 * largest))
    panels[0].legend(fontsize="small")
    figure.suptitle(f"{profile.model_name}, {profile.hardware}", fontsize="small")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _surfaces(profile: Profile) -> dict[str, SpeedupSurface]:
    """Return the speed-ups by drafter, over the batch sizes with verification points."""
    ladder = profiled_ladder(profile)
    return ladder.surfaces(verified_batches(profile), _ACCEPTANCES) if ladder else {}


def _axes(x_label: str, y_label: str, title: str):
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label, title=title)
    return figure, axes


def _shown_batches(profile: Profile) -> list[int]:
    """Return `BATCHES`, each limited to the profile's smallest and largest batch."""
    smallest, *_, largest = verified_batches(profile)
    return sorted({min(max(batch, smallest), largest) for batch in BATCHES})


def _verified(profile: Profile) -> list[ProfilePoint]:
    """Return the verification points at the first TP degree."""
    tp_degree = min(point.tp_degree for point in profile.of_kind(PointKind.DECODE))
    return [p for p in profile.of_kind(PointKind.VERIFY) if p.tp_degree == tp_degree]


def _cell(rung: Rung) -> str:
    return f"{rung.speedup:.2f} ({rung.window})" if rung.window else "no gain"
