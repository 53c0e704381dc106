"""Pictures of engines, or of GPUs, over time: a lane each, in several ways to do the same work."""

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
"""Colours of what lanes are busy with; then from the first again."""
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
    """A lane was busy with a batch. Seconds since the beginning."""

    lane: int
    start_s: float
    end_s: float
    batch: int
    kind: str = ""
    """Drafter or layout that it was busy with; empty: none."""


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One way to do the work: some of its lanes, from top to bottom."""

    name: str
    lanes: tuple[int, ...]
    spans: tuple[LaneSpan, ...]
    """Spans of all lanes, each's in order of time."""

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)


def pick_lanes(spans: Sequence[LaneSpan], num: int = 5) -> tuple[int, ...]:
    """The lane that is freed first, and then the slowest ones."""
    ends_s: dict[int, float] = {}
    for span in spans:
        ends_s[span.lane] = max(ends_s.get(span.lane, 0.0), span.end_s)
    ordered = sorted(ends_s, key=lambda lane: (ends_s[lane], lane))
    return (*ordered[:1], *ordered[1:][-(num - 1) :])


def pauses(spans: Sequence[LaneSpan], least_s: float) -> tuple[list[float], list[float]]:
    """When a lane was freed, and when it was used again; shorter pauses are none."""
    freed, reused = [], []
    for before, after in pairwise(spans):
        if after.start_s - before.end_s > least_s:
            freed.append(before.end_s)
            reused.append(after.start_s)
    return [*freed, *(span.end_s for span in spans[-1:])], reused


def draw_lanes(
    rows: Sequence[LaneRow],
    path: Path | str,
    title: str,
    *,
    lane: str = "engine",
    known: Mapping[str, str] | None = None,
) -> None:
    """A PNG: a block of lanes for each row, coloured by kind, as high as the batch is large
    (logarithmic), white where the lane is free.

    `lane`: word for one. `known`: colours of all kinds; None: the kinds are drafters, and where an
    engine is freed or used again is marked.
    """
    end_s = max(row.end_s for row in rows)
    shown = [span for row in rows for span in row.spans if span.lane in row.lanes]
    colours = colours_of(shown, known)
    largest = max((span.batch for span in shown), default=1)
    height_in = 1.4 + sum(0.5 + 0.24 * len(row.lanes) for row in rows)
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [len(row.lanes) for row in rows]
    blocks = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, row in zip(blocks, rows, strict=True):
        _draw_row(axes, row, colours, largest)
        axes.set_xlim(0.0, 1.02 * end_s)
        axes.set_yticks(range(len(row.lanes)), [f"{lane} {i}" for i in row.lanes], fontsize=8)
        for place, own in enumerate(() if known else row.lanes):
            _mark(axes, [span for span in row.spans if span.lane == own], place, end_s)
    blocks[-1].set_xlabel("seconds since the rollout began")
    figure.suptitle(title, fontsize=11)
    figure.legend(
        handles=_handles(colours, known is None), loc="outside lower center", ncols=6, fontsize=9
    )
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def colours_of(spans: Sequence[LaneSpan], known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Colours by kind, those that are known or one after the other; none has its own."""
    kinds = sorted({span.kind for span in spans})
    named = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(filter(None, kinds))}
    colours = {"": PLAIN_COLOUR, **(known or named)}
    return {kind: colour for kind, colour in colours.items() if kind in kinds}


def _handles(colours: Mapping[str, str], drafters: bool) -> list[Patch | Line2D]:
    if not drafters:
        return [Patch(color=colour, label=kind) for kind, colour in colours.items()]
    patches = [
        Patch(color=colour, label=f"drafter: {k or 'none'}") for k, colour in colours.items()
    ]
    marks = [
        Line2D([], [], marker=marker, ls="", color="black", label=text)
        for marker, text in WORDS.items()
    ]
    return [*patches, *marks]


def _draw_row(axes: Axes, row: LaneRow, colours: Mapping[str, str], largest: int) -> None:
    places = {lane: place for place, lane in enumerate(row.lanes)}
    own = [span for span in row.spans if span.lane in places]
    for kind, colour in colours.items():
        boxes = [_box(places[span.lane], span, largest) for span in own if span.kind == kind]
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
