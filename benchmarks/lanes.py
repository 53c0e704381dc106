"""Picture of engines over time: the drafter of each, in several ways to do the same work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log2
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

COLOURS = ("#2b6cb0", "#f5a300", "#3a9d5d", "#8e5bb5")
"""Colours of drafters. Further drafters begin again at the first."""
PLAIN_COLOUR = "#b8bec6"
LANE_HEIGHT = 0.8
"""Share of the distance between lanes that the largest batch fills."""
LEAST_HEIGHT = 0.25
"""Share of that which a batch of one fills."""
WIDTH_IN, DPI = 10.0, 120
FREED, REUSED = "v", "^"
WORDS = {FREED: "freed", REUSED: "used again"}


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """Time in which an engine was busy with a batch, in seconds since the beginning."""

    engine: int
    start_s: float
    end_s: float
    batch: int
    drafter: str = ""
    """Empty: none."""


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One way to do the work."""

    name: str
    engines: tuple[int, ...]
    """Engines that are drawn, from top to bottom."""
    spans: tuple[LaneSpan, ...]
    """Spans of all engines, in order of time for each engine."""

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)


def pauses(spans: Sequence[LaneSpan], least_s: float) -> tuple[list[float], list[float]]:
    """Return when an engine was freed, and when it was used again. Ignore shorter pauses."""
    freed, reused = [], []
    for before, after in pairwise(spans):
        if after.start_s - before.end_s > least_s:
            freed.append(before.end_s)
            reused.append(after.start_s)
    return [*freed, *(span.end_s for span in spans[-1:])], reused


def draw_lanes(rows: Sequence[LaneRow], path: Path | str, title: str) -> None:
    """Draw a PNG with a block of lanes for each row. A lane is as high as the batch is large
    (logarithmic), and white where the engine is free. Markers show when it is freed or used again.
    """
    end_s = max(row.end_s for row in rows)
    shown = [span for row in rows for span in row.spans if span.engine in row.engines]
    colours = colours_of(shown)
    largest = max((span.batch for span in shown), default=1)
    heights = [len(row.engines) for row in rows]
    height_in = 1.4 + sum(0.5 + 0.24 * height for height in heights)
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    blocks = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, row in zip(blocks, rows, strict=True):
        _draw_row(axes, row, colours, largest)
        axes.set_xlim(0.0, 1.02 * end_s)
        axes.set_yticks(range(len(row.engines)), [f"engine {i}" for i in row.engines], fontsize=8)
        for place, engine in enumerate(row.engines):
            _mark(axes, [span for span in row.spans if span.engine == engine], place, end_s)
    blocks[-1].set_xlabel("seconds since the rollout began")
    figure.suptitle(title, fontsize=11)
    handles = [
        *(Patch(color=colour, label=f"drafter: {k or 'none'}") for k, colour in colours.items()),
        *(Line2D([], [], marker=m, ls="", color="black", label=text) for m, text in WORDS.items()),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def colours_of(spans: Sequence[LaneSpan]) -> dict[str, str]:
    """Return a colour for each drafter. No drafter has its own."""
    drafters = sorted({span.drafter for span in spans})
    named = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(filter(None, drafters))}
    colours = {"": PLAIN_COLOUR, **named}
    return {name: colour for name, colour in colours.items() if name in drafters}


def _draw_row(axes: Axes, row: LaneRow, colours: Mapping[str, str], largest: int) -> None:
    places = {engine: place for place, engine in enumerate(row.engines)}
    own = [span for span in row.spans if span.engine in places]
    for drafter, colour in colours.items():
        of_drafter = [span for span in own if span.drafter == drafter]
        boxes = [_box(places[span.engine], span, largest) for span in of_drafter]
        axes.add_collection(PolyCollection(boxes, facecolor=colour, linewidth=0), autolim=False)
    axes.set_ylim(len(places) - 0.5, -0.6)
    axes.set_title(f"{row.name}: {row.end_s:,.0f} s", fontsize=10, loc="left")
    axes.axvline(row.end_s, color="0.4", lw=0.8, ls=(0, (3, 2)))


def _box(place: int, span: LaneSpan, largest: int) -> list[tuple[float, float]]:
    """Corners of a box in a lane, as high as the batch is large (logarithmic)."""
    share = log2(span.batch) / log2(largest) if span.batch > 1 else 0.0
    bottom = place + LANE_HEIGHT / 2
    top = bottom - LANE_HEIGHT * (LEAST_HEIGHT + (1 - LEAST_HEIGHT) * share)
    return [
        (span.start_s, bottom),
        (span.start_s, top),
        (span.end_s, top),
        (span.end_s, bottom),
    ]


def _mark(axes: Axes, spans: Sequence[LaneSpan], place: int, end_s: float) -> None:
    for times_s, marker in zip(pauses(spans, 0.002 * end_s), WORDS, strict=True):
        axes.plot(
            times_s, [place] * len(times_s), marker, ms=5, color="black", mec="white", mew=0.5
        )
