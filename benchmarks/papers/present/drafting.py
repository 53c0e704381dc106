"""Picture of which drafter worked on which engine when, under several ways to draft (SpecActor,
Fig. 14)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.papers.present.lanes import batch_box

COLOURS = ("#2b6cb0", "#f5a300", "#3a9d5d", "#8e5bb5")
"""Colours of drafters, by name; then from the first again."""
PLAIN_COLOUR = "#b8bec6"
LANE_HEIGHT = 0.8
"""Share of the distance between lanes that the largest batch fills."""
WIDTH_IN, DPI = 10.0, 120
FREED, REUSED = "v", "^"


@dataclass(frozen=True, slots=True)
class DraftingSpan:
    """An engine was busy with a batch and a drafter. Seconds since the rollout began."""

    engine: int
    start_s: float
    end_s: float
    batch: int
    drafter: str = ""
    """Empty: nobody drafts."""


@dataclass(frozen=True, slots=True)
class DraftingRow:
    """One way to draft: some of its engines, from top to bottom."""

    name: str
    engines: tuple[int, ...]
    spans: tuple[DraftingSpan, ...]
    """Spans of all engines, each's in order of time."""

    @property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)


def pick_engines(spans: Iterable[DraftingSpan], num: int = 5) -> tuple[int, ...]:
    """The engine that is freed first, and then the slowest ones."""
    ends_s: dict[int, float] = {}
    for span in spans:
        ends_s[span.engine] = max(ends_s.get(span.engine, 0.0), span.end_s)
    ordered = sorted(ends_s, key=lambda engine: (ends_s[engine], engine))
    return (*ordered[:1], *ordered[1:][-(num - 1) :])


def pauses(spans: Sequence[DraftingSpan], least_s: float) -> tuple[list[float], list[float]]:
    """When an engine was freed, and when it was used again; shorter pauses are none."""
    freed, reused = [], []
    for before, after in pairwise(spans):
        if after.start_s - before.end_s > least_s:
            freed.append(before.end_s)
            reused.append(after.start_s)
    return [*freed, *(span.end_s for span in spans[-1:])], reused


def draw_drafting(rows: Sequence[DraftingRow], path: Path | str, title: str) -> None:
    """A PNG: a block of lanes for each row, coloured by drafter, as high as the batch is large
    (logarithmic), white where the engine is free."""
    end_s = max(row.end_s for row in rows)
    shown = [span for row in rows for span in row.spans if span.engine in row.engines]
    colours = drafter_colours(shown)
    largest = max((span.batch for span in shown), default=1)
    height_in = 1.4 + sum(0.5 + 0.24 * len(row.engines) for row in rows)
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    blocks = figure.subplots(
        len(rows),
        sharex=True,
        squeeze=False,
        height_ratios=[len(row.engines) for row in rows],
    )[:, 0]
    for axes, row in zip(blocks, rows, strict=True):
        _draw_row(axes, row, colours, largest, end_s)
    blocks[-1].set_xlabel("seconds since the rollout began")
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=_handles(colours), loc="outside lower center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def drafter_colours(spans: Iterable[DraftingSpan]) -> dict[str, str]:
    drafters = sorted({span.drafter for span in spans} - {""})
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(drafters)}
    return {"": PLAIN_COLOUR} | colours


def _draw_row(
    axes: Axes, row: DraftingRow, colours: Mapping[str, str], largest: int, end_s: float
) -> None:
    lanes = {engine: lane for lane, engine in enumerate(row.engines)}
    own = [span for span in row.spans if span.engine in lanes]
    for drafter, colour in colours.items():
        boxes = [
            batch_box(lanes[span.engine], span, largest, LANE_HEIGHT)
            for span in own
            if span.drafter == drafter
        ]
        axes.add_collection(PolyCollection(boxes, facecolor=colour, linewidth=0), autolim=False)
    for engine, lane in lanes.items():
        _mark(axes, [span for span in own if span.engine == engine], lane, end_s)
    axes.set_xlim(0.0, 1.02 * end_s)
    axes.set_ylim(len(lanes) - 0.5, -0.6)
    axes.set_yticks(range(len(lanes)), [f"engine {engine}" for engine in lanes], fontsize=8)
    axes.set_title(f"{row.name}: {row.end_s:,.0f} s", fontsize=10, loc="left")
    axes.axvline(row.end_s, color="0.4", lw=0.8, ls=(0, (3, 2)))


def _mark(axes: Axes, spans: Sequence[DraftingSpan], lane: int, end_s: float) -> None:
    for times_s, marker in zip(pauses(spans, 0.002 * end_s), (FREED, REUSED), strict=True):
        lanes = [lane] * len(times_s)
        axes.plot(times_s, lanes, marker, ms=5, color="black", mec="white", mew=0.5)


def _handles(colours: Mapping[str, str]) -> list[Patch | Line2D]:
    patches = [
        Patch(color=colour, label=f"drafter: {name or 'none'}") for name, colour in colours.items()
    ]
    words = {FREED: "freed", REUSED: "used again"}
    marks = [
        Line2D([], [], marker=marker, ls="", color="black", label=text)
        for marker, text in words.items()
    ]
    return [*patches, *marks]
