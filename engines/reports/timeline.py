"""Picture and tables of a time window of a run, by engine."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from schemas.timeline import Activity, MoveKind, MoveRecord, Savings, Span, Timeline

BETWEEN_COLOUR = "#d5d8dc"
"""Colour between lanes, so that white always means idle time."""
MAIN_COLOUR = "#2b6cb0"
STEP_COLOURS = ("#9fd4b1", "#cdbbe8", "#e0cf9b", "#a9c9ea")
"""Colours of the other steps, in the order in which they begin. Further steps repeat them."""
OTHERS = " and others"
CLEAR_COLOUR, UNCLEAR_COLOUR = "#2f855a", "#b8bec6"
"""Colours of savings that are larger than their uncertainty, and of those that are not."""


class Look(NamedTuple):
    """Words and colour of an activity or a move."""

    words: str
    colour: str
    line: Any = "-"
    """Line style of an arrow."""


ACTIVITIES = {
    Activity.SYNC: Look("weight sync", "#f5a300"),
    Activity.RESTART: Look("restart", "#c0282d"),
    Activity.SWITCH: Look("GPUs change hands", "#7b3fa0"),
    Activity.PARKED: Look("parked: its GPUs are in another layout", "#a9b0b8"),
    Activity.TRAINING: Look("training, on the same GPUs", "#8fb3a3"),
}
"""Looks of all activities except rollouts, which have the colour of their step."""
MOVES = {
    MoveKind.MIGRATED: Look("migrated", "black"),
    MoveKind.DEFERRED: Look("deferred to the next step", "#c2007a", (0, (3, 1.5))),
    MoveKind.RACED: Look("raced on another engine too", "#00706b", (0, (1, 1))),
    MoveKind.RESHAPED: Look("with its GPUs to another TP degree", "#7b3fa0", (0, (5, 1, 1, 1))),
}
MOVE_COLUMNS = (
    *("migrated_in", "migrated_out", "deferred_out", "raced_in", "raced_out"),
    *("reshaped_in", "reshaped_out"),
)
"""Counts of moves in a table. A request in `raced_out` also continues on its own engine."""
MAX_MOVES = 5000
"""Most rows of a step's table of moves. The counts include further moves."""

LANE_HEIGHT = 0.76
"""Height of a lane, as a share of the distance between lanes."""
MAX_LABELS = 32
"""Most labelled lanes. With more lanes, only every second, third, ... has a label."""
MAX_ROOMY = 12
"""Up to this many lanes, a lane is high enough for words."""
WIDE_SHARE = 0.07
"""Shortest idle stretch that has room for words, as a share of the window."""
NUM_SLOTS = 150
"""Time slots of the window. Moves of one kind and engine pair in a slot are drawn as one arrow."""
LEAN_SHARE = 0.012
"""Slant of a move's arrow as a share of the window, so that simultaneous moves stay apart."""
LEFT_IN, RIGHT_IN, TOP_IN, BOTTOM_IN = 1.7, 0.3, 0.6, 1.2
"""Margins in inches. Matplotlib's automatic layout would take longer than the drawing."""
BAR_IN, CHART_MARGINS_IN, CHART_BOTTOM_IN = 0.3, 1.1, 0.5
"""Chart of savings in inches: distance of its bars; margins above and below all bars together;
margin below the axis."""
WIDTH_IN, DPI = 10.0, 100


def timeline_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a row per engine: seconds of each activity within the window, and counts of moves. The
    last row is `all`, whose idle share is the bubble share."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in timeline.spans:
        spans[span.engine].append(span)
    moves = Counter[tuple[str, int]]()
    for move in timeline.moves:
        moves[f"{move.kind}_out", move.from_engine] += 1
        moves[f"{move.kind}_in", move.to_engine] += 1
    rows: list[dict[str, Any]] = []
    for engine in timeline.engines:
        own = replace(timeline, engines=(engine,), spans=tuple(spans[engine]))
        row: dict[str, Any] = {"engine": engine}
        row |= {f"{activity}_s": own.seconds(engine, activity) for activity in Activity}
        row |= {"idle_s": own.idle_s(engine), "idle_share": own.bubble_share}
        rows.append(row | {name: moves[name, engine] for name in MOVE_COLUMNS})
    sums = {name: sum(row[name] for row in rows) for name in rows[0]}
    return [*rows, sums | {"engine": "all", "idle_share": timeline.bubble_share}]


def move_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Return a row per move, in order of time, at most `MAX_MOVES`. Times are in seconds since the
    window began, `num_tokens` counts response tokens."""
    return [
        {
            "request": str(move.id),
            "kind": str(move.kind),
            "from_engine": move.from_engine,
            "to_engine": move.to_engine,
            "at_s": round(move.at_s, 4),
            "num_tokens": move.num_tokens,
        }
        for move in timeline.moves_in_order()[:MAX_MOVES]
    ]


def draw_timeline(
    timeline: Timeline, path: Path | str, title: str, savings: Savings | None = None
) -> None:
    """Draw a PNG with one lane per engine over the seconds of the window. White is idle time. Below
    the lanes is the time that each technique saved, if known."""
    lanes = {engine: lane for lane, engine in enumerate(timeline.engines)}
    roomy = len(lanes) <= MAX_ROOMY
    bars = clip_spans(timeline)
    each = savings.each if savings else ()
    chart_in = CHART_MARGINS_IN + BAR_IN * len(each) if each else 0.0
    lanes_in = min(9.0, 0.9 + 0.32 * len(lanes))
    figure = Figure(figsize=(WIDTH_IN, lanes_in + TOP_IN + BOTTOM_IN + chart_in))
    axes = _add_axes(figure, BOTTOM_IN + chart_in, lanes_in)
    axes.set_facecolor(BETWEEN_COLOUR)
    axes.set_xlim(0.0, timeline.window_s or 1.0)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    handles = [
        *_draw_bars(axes, bars, lanes, timeline.window_s),
        *_draw_arrows(axes, join_moves(timeline), lanes, roomy),
    ]
    if roomy:
        _write_idle(axes, bars, lanes, timeline.window_s)
    _label(axes, timeline_rows(timeline), title)
    _explain(figure, handles, chart_in)
    if savings and each:
        _draw_savings(_add_axes(figure, CHART_BOTTOM_IN, BAR_IN * len(each)), savings)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})


def clip_spans(timeline: Timeline) -> list[Span]:
    """Return the spans in order of time, cut at both ends of the window, in seconds since its
    start."""
    begin_s, clipped = timeline.start_s, []
    for span in sorted(timeline.spans, key=lambda span: span.start_s):
        start_s, end_s = max(span.start_s, begin_s), min(span.end_s, timeline.end_s)
        if end_s > start_s:
            clipped.append(replace(span, start_s=start_s - begin_s, end_s=end_s - begin_s))
    return clipped


def join_moves(timeline: Timeline) -> Mapping[MoveRecord, int]:
    """Return the arrows to draw, in order of time, with the number of moves that each stands for.
    An arrow is the first move of its time slot, kind and pair of engines."""
    slot_s = timeline.window_s / NUM_SLOTS or 1.0
    first: dict[tuple[int, int, int, MoveKind], MoveRecord] = {}
    arrows = Counter[MoveRecord]()
    for move in timeline.moves_in_order():
        key = (int(move.at_s / slot_s), move.from_engine, move.to_engine, move.kind)
        arrows[first.setdefault(key, move)] += 1
    return arrows


def step_colours(bars: Sequence[Span]) -> dict[str, str]:
    """Return colours by step, in the order in which steps begin. The step with the most rollout
    time gets the main colour."""
    rollout_s: dict[str, float] = defaultdict(float)
    for bar in bars:
        if bar.activity is Activity.ROLLOUT:
            rollout_s[bar.label] += bar.end_s - bar.start_s
    main = max(rollout_s, key=rollout_s.__getitem__, default=None)
    others = [label for label in rollout_s if label != main]
    colours = {label: STEP_COLOURS[i % len(STEP_COLOURS)] for i, label in enumerate(others)}
    return {label: colours.get(label, MAIN_COLOUR) for label in rollout_s}


def idle_stretches(
    bars: Sequence[Span], engine: int, window_s: float
) -> Iterator[tuple[float, float]]:
    """Yield the start and end of each idle stretch, in seconds since the window began. `bars` must
    be in order of time."""
    free_s = 0.0
    for bar in bars:
        if bar.engine == engine:
            if bar.start_s > free_s:
                yield free_s, bar.start_s
            free_s = max(free_s, bar.end_s)
    if window_s > free_s:
        yield free_s, window_s


def _add_axes(figure: Figure, bottom_in: float, height_in: float) -> Axes:
    page_in, width = figure.get_figheight(), (WIDTH_IN - LEFT_IN - RIGHT_IN) / WIDTH_IN
    return figure.add_axes((LEFT_IN / WIDTH_IN, bottom_in / page_in, width, height_in / page_in))


def _draw_bars(
    axes: Axes, bars: Sequence[Span], lanes: Mapping[int, int], window_s: float
) -> list[Patch]:
    """Draw white lanes with bars over them. Return the legend's entries."""
    _draw_boxes(axes, [(lane, 0.0, window_s) for lane in lanes.values()], "white")
    colours = step_colours(bars)
    boxes: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for bar in bars:
        look = ACTIVITIES.get(bar.activity)
        colour = look.colour if look else colours[bar.label]
        boxes[colour].append((lanes[bar.engine], bar.start_s, bar.end_s))
    words = _step_words(colours)
    words |= {look.colour: look.words for look in ACTIVITIES.values()}
    for colour in words:
        # Draw a border, so that even a short sync or restart is visible.
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
    """Return the legend's words for each colour."""
    words: dict[str, str] = {}
    for label, colour in colours.items():
        if colour not in words:
            words[colour] = f"rollout of {label.replace('/', ' step ')}" if label else "rollout"
        elif not words[colour].endswith(OTHERS):
            words[colour] += OTHERS
    return words


def _write_idle(
    axes: Axes, bars: Sequence[Span], lanes: Mapping[int, int], window_s: float
) -> None:
    """Write idle seconds at the bottom of lanes, because arrows start and end in the middle."""
    for engine, lane in lanes.items():
        for start_s, end_s in idle_stretches(bars, engine, window_s):
            if end_s - start_s >= WIDE_SHARE * window_s:
                x, y = (start_s + end_s) / 2, lane + LANE_HEIGHT / 2
                text = f"idle {end_s - start_s:.3g} s"
                axes.text(x, y, text, ha="center", va="bottom", fontsize=8)


def _draw_arrows(
    axes: Axes, arrows: Collection[MoveRecord], lanes: Mapping[int, int], roomy: bool
) -> list[Line2D]:
    """Draw each arrow from a dot at the time of the move. Return the legend's entries."""
    handles = []
    for kind, look in MOVES.items():
        own = [arrow for arrow in arrows if arrow.kind is kind]
        if own:
            _draw_arrows_alike(axes, own, look, lanes, roomy)
            handles.append(
                Line2D([], [], color=look.colour, ls=look.line, marker=">", label=look.words)
            )
    return handles


def _draw_arrows_alike(
    axes: Axes, arrows: Collection[MoveRecord], look: Look, lanes: Mapping[int, int], roomy: bool
) -> None:
    """Draw all arrows of one kind. If there is little room, draw them thin and translucent."""
    _, colour, dashes = look
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


def _label(axes: Axes, rows: Sequence[Mapping[str, Any]], title: str) -> None:
    *engines, everything = rows
    every = ceil(len(engines) / MAX_LABELS)
    words = [f"engine {row['engine']}  idle {100 * row['idle_share']:.0f} %" for row in engines]
    axes.set_yticks(range(0, len(engines), every), words[::every], fontsize=9)
    axes.set_xlabel("seconds since the window began")
    axes.set_title(
        f"{title}\nidle: {100 * everything['idle_share']:.0f} % of all engines' time", fontsize=11
    )


def _explain(figure: Figure, handles: Sequence[Artist], chart_in: float) -> None:
    """Draw the legend below the axis."""
    top = (BOTTOM_IN + chart_in - 0.5) / figure.get_figheight()
    legend = figure.legend(handles=handles, ncols=4, fontsize=9, frameon=False)
    legend.set_loc("upper center")
    legend.set_bbox_to_anchor((0.5, top))


def _draw_savings(axes: Axes, savings: Savings) -> None:
    """Draw a bar for each technique, grey if its saving is within the uncertainty."""
    places = range(len(savings.each))
    axes.barh(
        places,
        [saving.saved_s for saving in savings.each],
        height=0.6,
        color=[CLEAR_COLOUR if saving.clear else UNCLEAR_COLOUR for saving in savings.each],
        xerr=[saving.uncertainty_s for saving in savings.each],
        ecolor="0.2",
        capsize=3.0,
    )
    words = [f"{s.technique}  {s.saved_s:+.2f} s" for s in savings.each]
    axes.set_yticks(list(places), words, fontsize=9)
    axes.tick_params(left=False)
    axes.set_ylim(len(savings.each) - 0.5, -0.5)
    axes.axvline(0.0, color="0.2", linewidth=0.8)
    axes.set_xlabel(
        f"seconds of a rollout of {savings.measured_s:.2f} s; grey: not distinguishable from none",
        fontsize=9,
    )
    axes.set_title("saved: predicted without it, minus measured", fontsize=10)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
