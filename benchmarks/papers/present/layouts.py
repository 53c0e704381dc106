"""Picture of which TP degree has which GPUs when, and with how many requests, in several ways to
roll out one step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.papers.present.lanes import batch_box

COLOURS = {1: "#8e5bb5", 2: "#2b6cb0", 4: "#3a9d5d", 8: "#f5a300"}
"""Colours by TP degree."""
OTHER_COLOUR = "#6b7280"
LANE_HEIGHT = 0.9
"""Share of the distance between lanes that the largest batch fills."""
WIDTH_IN, DPI = 10.0, 120


@dataclass(frozen=True, slots=True)
class LayoutSpan:
    """An engine was busy. Seconds since the step began."""

    tp_degree: int
    gpus: tuple[int, ...]
    start_s: float
    end_s: float
    batch: int


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """One way to roll out."""

    name: str
    num_gpus: int
    spans: tuple[LayoutSpan, ...]

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)


def draw_layouts(rows: Sequence[LayoutRow], path: Path | str, title: str) -> None:
    """A PNG: a lane for each GPU, coloured by the TP degree of its engine, as high as the batch is
    large (logarithmic), white where it is idle or changes hands."""
    end_s = max(row.end_s for row in rows)
    largest = max(span.batch for row in rows for span in row.spans)
    figure = Figure(figsize=(WIDTH_IN, 1.4 + 1.9 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    blocks = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for axes, row in zip(blocks, rows, strict=True):
        _draw_row(axes, row, largest, end_s)
    blocks[-1].set_xlabel("seconds since the step began")
    figure.suptitle(title, fontsize=11)
    handles = [Patch(color=colour, label=f"TP {tp}") for tp, colour in colours(rows).items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def colours(rows: Iterable[LayoutRow]) -> Mapping[int, str]:
    degrees = sorted({span.tp_degree for row in rows for span in row.spans})
    return {degree: COLOURS.get(degree, OTHER_COLOUR) for degree in degrees}


def _draw_row(axes: Axes, row: LayoutRow, largest: int, end_s: float) -> None:
    for degree, colour in colours([row]).items():
        own = [span for span in row.spans if span.tp_degree == degree]
        boxes = [batch_box(gpu, span, largest, LANE_HEIGHT) for span in own for gpu in span.gpus]
        axes.add_collection(PolyCollection(boxes, facecolor=colour, linewidth=0), autolim=False)
    axes.set_xlim(0.0, 1.02 * end_s)
    axes.set_ylim(row.num_gpus - 0.5, -0.6)
    axes.set_yticks(range(row.num_gpus), [f"GPU {gpu}" for gpu in range(row.num_gpus)], fontsize=7)
    axes.set_title(f"{row.name}: {row.end_s:,.0f} s", fontsize=10, loc="left")
    axes.axvline(row.end_s, color="0.4", lw=0.8, ls=(0, (3, 2)))
