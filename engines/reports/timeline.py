"""Picture and table of a stretch of a run, by engine."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from engines.reports.savings_chart import MARGINS_IN, chart_height_in, draw_savings
from schemas.timeline import Activity, MoveKind, Savings, Span, Timeline

BETWEEN_COLOUR = "#d5d8dc"
"""Colour between lanes, so that white is idle time and nothing else."""
MAIN_COLOUR = "#2b6cb0"
"""Colour of the step with the most rollout time in the window."""
STEP_COLOURS = ("#9fd4b1", "#cdbbe8", "#e0cf9b", "#a9c9ea")
"""Colours of the other steps, in the order in which they begin; then from the first again."""
ACTIVITY_COLOURS = {
    Activity.SYNC: "#f5a300",
    Activity.RESTART: "#c0282d",
    Activity.SWITCH: "#7b3fa0",
    Activity.PARKED: "#a9b0b8",
}
MOVE_COLOURS = {
    MoveKind.MIGRATED: "black",
    MoveKind.DEFERRED: "#c2007a",
    MoveKind.RACED: "#00706b",
    MoveKind.RESHAPED: "#7b3fa0",
}
MOVE_LINES = {
    MoveKind.MIGRATED: "-",
    MoveKind.DEFERRED: (0, (3, 1.5)),
    MoveKind.RACED: (0, (1, 1)),
    MoveKind.RESHAPED: (0, (5, 1, 1, 1)),
}
MOVE_WORDS = {
    MoveKind.MIGRATED: "migrated",
    MoveKind.DEFERRED: "deferred to the next step",
    MoveKind.RACED: "raced on another engine too",
    MoveKind.RESHAPED: "with its GPUs to another TP degree",
}
OTHERS = " and others"
ACTIVITY_WORDS = {
    Activity.SYNC: "weight sync",
    Activity.RESTART: "restart",
    Activity.SWITCH: "TP switch",
    Activity.PARKED: "parked: its GPUs are in another layout",
}

LANE_HEIGHT = 0.76
"""Share of the distance between lanes that a lane fills."""
MAX_LABELS = 32
"""Lanes up to which each has a label; of more, only every second, third, ... has one."""
MAX_ROOMY = 12
"""Lanes that are high enough for words in them, at most so many."""
WIDE_SHARE = 0.07
"""Share of the window from which an idle stretch has room for words."""
NUM_SLOTS = 150
"""Slots of the window; moves between the same two engines in one slot are one arrow."""
LEAN_SHARE = 0.012
"""Share of the window by which a move's arrow leans, so that moves of one moment stay apart."""
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.7, 0.3, 0.6, 1.2
"""Margins in inches. A computed layout would cost more time than the drawing."""
WIDTH_IN, DPI = 10.0, 100


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Time of one engine within the window, in seconds, and its numbers of moves."""

    engine: int | str
    """`all` for all of them together."""
    rollout_s: float
    sync_s: float
    restart_s: float
    switch_s: float
    parked_s: float
    idle_s: float
    idle_share: float
    migrated_in: int
    migrated_out: int
    deferred_out: int
    raced_in: int
    raced_out: int
    """Requests that were raced from here on another engine; they went on here."""
    reshaped_in: int
    reshaped_out: int


_MOVE_COLUMNS = tuple(f.name for f in fields(EngineTime) if f.name.endswith(("_in", "_out")))


@dataclass(frozen=True, slots=True)
class Bar:
    """A span within the window; seconds since the window began."""

    engine: int
    activity: Activity
    label: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """Moves of one kind between the same two engines at about the same time."""

    from_engine: int
    to_engine: int
    kind: MoveKind
    at_s: float
    """Seconds from the window's beginning to the first of them."""
    num_moves: int


def timeline_rows(timeline: Timeline) -> list[dict[str, str | int | float]]:
    """One row per engine and then `all`, whose idle share is the bubble share."""
    return [asdict(time) for time in engine_times(timeline)]


def draw_timeline(
    timeline: Timeline, path: Path | str, title: str, savings: Savings | None = None
) -> None:
    """A PNG: one lane per engine over the seconds of the window, white where it is idle; below them
    what each technique saved, where that is known."""
    lanes = {engine: lane for lane, engine in enumerate(timeline.engines)}
    roomy = len(lanes) <= MAX_ROOMY
    bars = clip_spans(timeline)
    chart_in = chart_height_in(savings)
    figure, axes = _axes(_window_s(timeline), len(lanes), chart_in)
    handles = [
        *_draw_bars(axes, bars, lanes, _window_s(timeline)),
        *_draw_arrows(axes, join_moves(timeline), lanes, roomy),
    ]
    if roomy:
        _write_idle(axes, bars, lanes, _window_s(timeline))
    _label(axes, engine_times(timeline), title)
    _explain(figure, handles, chart_in)
    if savings and chart_in:
        draw_savings(_chart_axes(figure, chart_in), savings)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def engine_times(timeline: Timeline) -> list[EngineTime]:
    """One per engine, in the timeline's order, and then all together."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.engine].append(span)
    moves = Counter[tuple[str, int]]()
    for move in timeline.moves:
        moves[f"{move.kind}_out", move.from_engine] += 1
        moves[f"{move.kind}_in", move.to_engine] += 1
    each = [
        _engine_time(replace(timeline, engines=(engine,), spans=tuple(spans[engine])), moves)
        for engine in timeline.engines
    ]
    return [*each, _all_together(each, timeline.bubble_share)]


def clip_spans(timeline: Timeline) -> list[Bar]:
    """Bars within the window, in order of time; a span that goes on ends with the window."""
    bars = []
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        end_s = timeline.end_s if span.end_s is None else min(span.end_s, timeline.end_s)
        start_s = max(span.start_s, timeline.start_s)
        if end_s > start_s:
            begins_s, ends_s = start_s - timeline.start_s, end_s - timeline.start_s
            bars.append(Bar(span.engine, span.activity, span.label, begins_s, ends_s))
    return bars


def join_moves(timeline: Timeline) -> list[Arrow]:
    """Arrows in order of time; no more than one per slot of time, kind and pair of engines."""
    slot_s = _window_s(timeline) / NUM_SLOTS or 1.0
    joined: dict[tuple[int, int, int, MoveKind], list[float]] = defaultdict(list)
    for move in sorted(timeline.moves, key=lambda move: move.at_s):
        at_s = move.at_s - timeline.start_s
        key = (int(at_s / slot_s), move.from_engine, move.to_engine, move.kind)
        joined[key].append(at_s)
    return [
        Arrow(from_engine, to_engine, kind, at_s[0], len(at_s))
        for (_, from_engine, to_engine, kind), at_s in joined.items()
    ]


def step_colours(bars: Sequence[Bar]) -> dict[str, str]:
    """Colours by step, in the order in which they begin."""
    rollout_s = _rollout_s(bars)
    main = main_step(bars)
    others = [label for label in rollout_s if label != main]
    colours = {label: STEP_COLOURS[i % len(STEP_COLOURS)] for i, label in enumerate(others)}
    return {label: colours.get(label, MAIN_COLOUR) for label in rollout_s}


def main_step(bars: Sequence[Bar]) -> str | None:
    """Step with the most rollout time in the window."""
    rollout_s = _rollout_s(bars)
    return max(rollout_s, key=rollout_s.__getitem__, default=None)


def _rollout_s(bars: Sequence[Bar]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for bar in bars:
        if bar.activity is Activity.ROLLOUT:
            seconds[bar.label] += bar.end_s - bar.start_s
    return seconds


def idle_stretches(
    bars: Sequence[Bar], engine: int, window_s: float
) -> Iterator[tuple[float, float]]:
    """Beginnings and ends, in seconds since the window began; `bars` are in order of time."""
    free_s = 0.0
    for bar in bars:
        if bar.engine == engine:
            if bar.start_s > free_s:
                yield free_s, bar.start_s
            free_s = max(free_s, bar.end_s)
    if window_s > free_s:
        yield free_s, window_s


def _engine_time(own: Timeline, moves: Mapping[tuple[str, int], int]) -> EngineTime:
    """Time of the engine of a timeline that has only one."""
    (engine,) = own.engines
    numbers: dict[str, Any] = {name: moves[name, engine] for name in _MOVE_COLUMNS}
    seconds: dict[str, Any] = {
        f"{activity}_s": own.seconds(engine, activity) for activity in Activity
    }
    seconds |= {"idle_s": own.idle_s(engine), "idle_share": own.bubble_share}
    return EngineTime(engine=engine, **seconds, **numbers)


def _all_together(each: Sequence[EngineTime], bubble_share: float) -> EngineTime:
    names = ("idle_s", *(f"{activity}_s" for activity in Activity), *_MOVE_COLUMNS)
    sums: dict[str, Any] = {"idle_share": bubble_share}
    sums |= {name: sum(getattr(time, name) for time in each) for name in names}
    return EngineTime(engine="all", **sums)


def _axes(window_s: float, num_lanes: int, chart_in: float) -> tuple[Figure, Axes]:
    height_in = min(9.0, 0.9 + 0.32 * num_lanes)
    below_in = BOTTOM_IN + chart_in
    page_in = height_in + TOP_IN + below_in
    figure = Figure(figsize=(WIDTH_IN, page_in))
    FigureCanvasAgg(figure)
    width = (WIDTH_IN - LEFT_IN - RIGHT_IN) / WIDTH_IN
    axes = figure.add_axes((LEFT_IN / WIDTH_IN, below_in / page_in, width, height_in / page_in))
    axes.set_facecolor(BETWEEN_COLOUR)
    axes.set_xlim(0.0, window_s or 1.0)
    axes.set_ylim(num_lanes - 0.5, -0.5)
    return figure, axes


def _chart_axes(figure: Figure, chart_in: float) -> Axes:
    """Below the legend."""
    page_in, bottom_in = figure.get_figheight(), 0.5
    width = (WIDTH_IN - LEFT_IN - RIGHT_IN) / WIDTH_IN
    height_in = chart_in - MARGINS_IN
    return figure.add_axes((LEFT_IN / WIDTH_IN, bottom_in / page_in, width, height_in / page_in))


def _draw_bars(
    axes: Axes, bars: Sequence[Bar], lanes: Mapping[int, int], window_s: float
) -> list[Patch]:
    """Lanes are white, bars lie over them. Returns what explains them in the legend."""
    _draw_boxes(axes, [(lane, 0.0, window_s) for lane in lanes.values()], "white")
    colours = step_colours(bars)
    boxes: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for bar in bars:
        colour = (
            colours[bar.label]
            if bar.activity is Activity.ROLLOUT
            else ACTIVITY_COLOURS[bar.activity]
        )
        boxes[colour].append((lanes[bar.engine], bar.start_s, bar.end_s))
    words = _step_words(colours)
    words |= {ACTIVITY_COLOURS[activity]: text for activity, text in ACTIVITY_WORDS.items()}
    for colour in words:
        # However short, a sync or a restart is seen.
        _draw_boxes(axes, boxes[colour], colour, 0.0 if colour in colours.values() else 1.0)
    handles = [Patch(color=colour, label=text) for colour, text in words.items() if boxes[colour]]
    return [*handles, Patch(facecolor="white", edgecolor="0.4", label="idle (a bubble)")]


def _draw_boxes(
    axes: Axes, boxes: Sequence[tuple[int, float, float]], colour: str, line_width: float = 0.0
) -> None:
    half = LANE_HEIGHT / 2
    corners = [
        [(start, lane - half), (start, lane + half), (end, lane + half), (end, lane - half)]
        for lane, start, end in boxes
    ]
    axes.add_collection(
        PolyCollection(corners, facecolor=colour, edgecolor=colour, linewidth=line_width),
        autolim=False,
    )


def _step_words(colours: Mapping[str, str]) -> dict[str, str]:
    """Words for each colour, for the legend."""
    words: dict[str, str] = {}
    for label, colour in colours.items():
        if colour not in words:
            words[colour] = f"rollout of {label.replace('/', ' step ')}" if label else "rollout"
        elif not words[colour].endswith(OTHERS):
            words[colour] += OTHERS
    return words


def _write_idle(axes: Axes, bars: Sequence[Bar], lanes: Mapping[int, int], window_s: float) -> None:
    """Write idle seconds at the bottom of the lane, as arrows begin and end in its middle."""
    for engine, lane in lanes.items():
        for start_s, end_s in idle_stretches(bars, engine, window_s):
            if end_s - start_s >= WIDE_SHARE * window_s:
                x, y = (start_s + end_s) / 2, lane + LANE_HEIGHT / 2
                text = f"idle {end_s - start_s:.3g} s"
                axes.text(x, y, text, ha="center", va="bottom", fontsize=8)


def _draw_arrows(
    axes: Axes, arrows: Sequence[Arrow], lanes: Mapping[int, int], roomy: bool
) -> list[Line2D]:
    """Draw each arrow from a dot at the time of the move. Returns what explains them in the
    legend."""
    handles = []
    for kind, words in MOVE_WORDS.items():
        own = [arrow for arrow in arrows if arrow.kind is kind]
        if own:
            colour, dashes = MOVE_COLOURS[kind], MOVE_LINES[kind]
            _draw_arrows_alike(axes, own, lanes, roomy)
            handles.append(Line2D([], [], color=colour, ls=dashes, marker=">", label=words))
    return handles


def _draw_arrows_alike(
    axes: Axes, arrows: Sequence[Arrow], lanes: Mapping[int, int], roomy: bool
) -> None:
    """All of one kind. Where there is no room, many are thin and see-through."""
    colour, dashes = MOVE_COLOURS[arrows[0].kind], MOVE_LINES[arrows[0].kind]
    tails = np.array([(arrow.at_s, lanes[arrow.from_engine]) for arrow in arrows])
    heads = np.array([(arrow.at_s, lanes[arrow.to_engine]) for arrow in arrows])
    heads[:, 0] += LEAN_SHARE * axes.get_xlim()[1]
    ends = [*np.stack([tails, heads], axis=1)]
    if roomy:
        axes.add_collection(LineCollection(ends, colors="white", linewidths=3.0), autolim=False)
    width, alpha = (1.3, 1.0) if roomy else (0.7, 0.5)
    lines = LineCollection(ends, colors=colour, linewidths=width, linestyles=[dashes], alpha=alpha)
    axes.add_collection(lines, autolim=False)
    down = heads[:, 1] >= tails[:, 1]
    for points, marker in ((tails, "o"), (heads[down], "v"), (heads[~down], "^")):
        size = (5.0 if marker == "o" else 7.0) * (1.0 if roomy else 0.5)
        axes.plot(*points.T, marker=marker, ms=size, ls="", color=colour, mec="white", mew=0.4)


def _label(axes: Axes, times: Sequence[EngineTime], title: str) -> None:
    *engines, everything = times
    every = ceil(len(engines) / MAX_LABELS)
    words = [f"engine {time.engine}  idle {100 * time.idle_share:.0f} %" for time in engines]
    axes.set_yticks(range(0, len(engines), every), words[::every], fontsize=9)
    axes.set_xlabel("seconds since the window began")
    axes.set_title(
        f"{title}\nidle: {100 * everything.idle_share:.0f} % of all engines' time", fontsize=11
    )


def _explain(figure: Figure, handles: Sequence[Artist], chart_in: float) -> None:
    """The legend, below the axis."""
    top = (BOTTOM_IN + chart_in - 0.5) / figure.get_figheight()
    legend = figure.legend(handles=handles, ncols=4, fontsize=9, frameon=False)
    legend.set_loc("upper center")
    legend.set_bbox_to_anchor((0.5, top))


def _window_s(timeline: Timeline) -> float:
    return timeline.end_s - timeline.start_s


def _share(part_s: float, whole_s: float) -> float:
    return part_s / whole_s if whole_s else 0.0
