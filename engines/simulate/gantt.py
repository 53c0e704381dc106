"""A picture of who was busy when."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from engines.simulate.batching import Interval

NUM_BINS = 1200


def batch_over_time(
    timelines: Sequence[Sequence[Interval]], step_s: float, num_bins: int = NUM_BINS
) -> np.ndarray:
    """Mean batch size of each engine in each of `num_bins` equal parts of the step; [E, T]."""
    edges = np.linspace(0.0, step_s, num_bins + 1)
    rows = []
    for intervals in timelines:
        times = np.array([(i.start_s, i.end_s) for i in intervals]).ravel()
        areas = np.array([(0.0, i.batch * (i.end_s - i.start_s)) for i in intervals]).ravel()
        grown = np.interp(edges, times, np.cumsum(areas)) if len(times) else np.zeros(len(edges))
        rows.append(np.diff(grown) / (step_s / num_bins))
    return np.array(rows)


def draw_gantt(
    timelines: Sequence[Sequence[Interval]], step_s: float, path: Path | str, title: str = ""
) -> None:
    """A PNG: one line per engine, coloured by batch size (logarithmic), white where idle."""
    batches = batch_over_time(timelines, step_s)
    busy = np.ma.masked_less(batches, 1e-3)
    figure = Figure(figsize=(10, min(12.0, 2.0 + 0.25 * len(timelines))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        np.ma.maximum(busy, 1.0),
        aspect="auto",
        interpolation="nearest",
        extent=(0.0, step_s, len(timelines) - 0.5, -0.5),
        norm=LogNorm(1.0, max(2.0, float(batches.max()))),
    )
    axes.set(xlabel="virtual seconds", ylabel="engine", title=title)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, label="requests in the batch")
    figure.savefig(path, dpi=120, metadata={"Software": None})
