"""A profile for people: a table in the terminal, and pictures."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from engines.latency.fitted import FittedLatency
from engines.latency.speedup import SpeedupSurface
from engines.reports.ladder import (
    draw_ladder,
    ladder_rungs,
    ladder_table,
    profiled_ladder,
    verified_batches,
)
from schemas.latency import Accuracy, PointKind, Profile
from schemas.profile import ProfileReport

_ACCEPTANCES = tuple(round(share * 0.05, 2) for share in range(1, 21))


def print_profile(report: ProfileReport, console: Console | None = None) -> None:
    """Show what was measured, how well the fit predicts it, and where drafting pays."""
    console, profile = console or Console(), report.profile
    console.print(
        f"{profile.model_name} ({profile.dtype}) on {profile.hardware}: {len(profile.points)} "
        f"points, KV cache of {profile.max_active_tokens:,} tokens",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for column in ("error of the fit", "withheld", "points", "median", "90 %"):
        table.add_column(column)
    for what, accuracies in (
        ("points of a curve", report.held_out),
        ("a whole batch size", report.between_batches),
    ):
        for accuracy in accuracies:
            table.add_row(accuracy.kind.value, what, *_errors(accuracy))
    console.print(table)
    for line in paying_lines(profile):
        console.print(line, highlight=False)
    if rungs := ladder_rungs(profile):
        console.print(ladder_table(rungs))
    console.print(f"profile: {report.profile_file}", highlight=False, soft_wrap=True)


def paying_lines(profile: Profile) -> list[str]:
    """Up to which batch each drafter pays, at a few acceptances."""
    lines = []
    for drafter, surface in _surfaces(profile).items():
        largest = [(surface.max_paying_batch(p), p) for p in (0.3, 0.5, 0.7, 0.9)]
        words = [f"{f'batch {batch}' if batch else 'no batch'} at {p:.0%}" for batch, p in largest]
        lines.append(f"drafting with {drafter} pays up to {', '.join(words)} acceptance")
    return lines


def draw_profile(report: ProfileReport) -> list[Path]:
    """Draw the pictures beside the profile; returns their files."""
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
    """Measured points and the fit, one curve per TP degree and batch size."""
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
    """Speed-up of the best window over batch and acceptance; the line is where drafting stops
    paying."""
    figure, axes = _axes("batch", "acceptance", f"best speed-up of drafting with {drafter}")
    axes.set_xscale("log", base=2)
    grid = (surface.batches, surface.acceptances, surface.speedups.T)
    image = axes.pcolormesh(*grid, shading="nearest", vmin=1.0)
    if surface.speedups.min() <= 1.0 < surface.speedups.max():
        axes.contour(*grid, levels=[1.0 + 1e-9], colors="white")
    figure.colorbar(image, label="tokens/s over decoding")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def _surfaces(profile: Profile) -> dict[str, SpeedupSurface]:
    """Speed-ups by drafter, over the batch sizes that were verified."""
    ladder = profiled_ladder(profile)
    return ladder.surfaces(verified_batches(profile), _ACCEPTANCES) if ladder else {}


def _errors(accuracy: Accuracy) -> Sequence[str]:
    return (
        str(accuracy.num_points),
        f"{accuracy.median_error:.1%}",
        f"{accuracy.p90_error:.1%}",
    )


def _axes(x_label: str, y_label: str, title: str):
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel=x_label, ylabel=y_label, title=title)
    return figure, axes
