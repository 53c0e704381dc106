"""Timelines as tables and pictures. The tests decode the pictures and look at colours."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from engines.reports.timeline import (
    ACTIVITIES,
    CLEAR_COLOUR,
    MAIN_COLOUR,
    UNCLEAR_COLOUR,
    clip_spans,
    draw_timeline,
    idle_stretches,
    join_moves,
    step_colours,
    timeline_rows,
)
from engines.reports.timeline import MOVES as LOOKS
from schemas.rollout import RequestId, Split
from schemas.timeline import (
    Activity,
    MoveKind,
    MoveRecord,
    Saving,
    Savings,
    Span,
    Technique,
    Timeline,
)

SECONDS = ("rollout_s", "sync_s", "restart_s", "idle_s")
MOVES_OF_ROW = ("migrated_in", "migrated_out", "deferred_out", "raced_in", "raced_out")
SPANS = (
    Span(0, Activity.ROLLOUT, "train/1", 90.0, 103.0),
    Span(0, Activity.SYNC, "train/2", 103.0, 105.0),
    Span(0, Activity.ROLLOUT, "train/2", 105.0),
    Span(1, Activity.ROLLOUT, "train/2", 101.0, 104.0),
    Span(1, Activity.RESTART, "", 104.0, 106.0),
    Span(1, Activity.SYNC, "train/2", 106.0, 107.0),
    Span(1, Activity.ROLLOUT, "train/2", 107.0, 110.0),
    Span(1, Activity.ROLLOUT, "train/3", 115.0, 140.0),
    Span(7, Activity.ROLLOUT, "train/1", 80.0, 100.0),
    Span(7, Activity.ROLLOUT, "train/3", 120.0, 130.0),
)
"""Some spans begin before the window, some end after it, and some only touch it."""


MIGRATED, DEFERRED, RACED = MoveKind.MIGRATED, MoveKind.DEFERRED, MoveKind.RACED


def move(from_engine: int, to_engine: int, at_s: float, kind: MoveKind = MIGRATED) -> MoveRecord:
    id = RequestId(Split.TRAIN, 2, "prompt", int(at_s * 10))
    return MoveRecord(id, from_engine, to_engine, kind, at_s, 5)


MOVES = (
    move(0, 7, 108.0),
    move(0, 7, 108.01),
    move(1, 0, 108.0),
    move(1, 7, 109.0, DEFERRED),
    move(1, 7, 109.0, RACED),
    move(0, 7, 109.0, RACED),
)
TIMELINE = Timeline(100.0, 120.0, (0, 1, 7), SPANS, MOVES)


SWITCHED = Timeline(
    0.0,
    20.0,
    (0, 1, 2),
    (
        Span(0, Activity.ROLLOUT, "train/1", 0.0, 10.0),
        Span(0, Activity.PARKED, "", 10.0),
        Span(1, Activity.ROLLOUT, "train/1", 0.0, 8.0),
        Span(1, Activity.PARKED, "", 10.0),
        Span(2, Activity.PARKED, "", 0.0, 10.0),
        Span(2, Activity.SWITCH, "train/1", 10.0, 11.0),
        Span(2, Activity.ROLLOUT, "train/1", 11.0, 18.0),
    ),
    (move(0, 2, 10.0, MoveKind.RESHAPED),),
    {0: 1, 1: 1, 2: 2},
)
"""Two engines of one GPU each become one engine of two GPUs."""


def pixels(timeline: Timeline, tmp_path, savings: Savings | None = None) -> np.ndarray:
    """Return the picture: [height, width, RGB], 0 to 1."""
    path = tmp_path / "timeline.png"
    draw_timeline(timeline, path, "title", savings)
    return imread(path)[:, :, :3]


def coloured(picture: np.ndarray, colour: str) -> np.ndarray:
    return np.all(np.abs(picture - to_rgb(colour)) < 0.005, axis=-1)


def test_every_engines_seconds_add_up_to_the_window():
    *engines, _ = timeline_rows(TIMELINE)
    assert [row["engine"] for row in engines] == [0, 1, 7]
    assert [[row[name] for name in SECONDS] for row in engines] == [
        [18.0, 2.0, 0.0, 0.0],
        [11.0, 1.0, 2.0, 6.0],
        [0.0, 0.0, 0.0, 20.0],
    ]
    assert [row["idle_share"] for row in engines] == [0.0, 0.3, 1.0]


def test_the_last_row_is_the_sum():
    *engines, everything = timeline_rows(TIMELINE)
    assert everything["engine"] == "all"
    for name in (*SECONDS, *MOVES_OF_ROW):
        assert everything[name] == sum(row[name] for row in engines)
    assert everything["idle_share"] == TIMELINE.bubble_share == pytest.approx(26 / 60)


def test_moves_are_counted():
    rows = timeline_rows(TIMELINE)
    counts = [tuple(row[name] for name in MOVES_OF_ROW) for row in rows]
    assert counts == [(1, 2, 0, 0, 1), (0, 1, 1, 0, 1), (2, 0, 0, 2, 0), (3, 3, 1, 2, 2)]


def test_bars_and_idle_stretches_fill_the_window():
    bars = clip_spans(TIMELINE)
    assert all(0.0 <= bar.start_s < bar.end_s <= 20.0 for bar in bars)
    for row in timeline_rows(TIMELINE)[:-1]:
        own = [bar for bar in bars if bar.engine == row["engine"]]
        idle = list(idle_stretches(bars, row["engine"], 20.0))
        assert sum(end - start for start, end in idle) == row["idle_s"]
        assert sum(bar.end_s - bar.start_s for bar in own) == 20.0 - row["idle_s"]
    assert list(idle_stretches(bars, 1, 20.0)) == [(0.0, 1.0), (10.0, 15.0)]


def test_the_step_with_most_rollout_time_has_the_main_colour():
    colours = step_colours(clip_spans(TIMELINE))
    assert list(colours) == ["train/1", "train/2", "train/3"]
    assert [label for label, colour in colours.items() if colour == MAIN_COLOUR] == ["train/2"]
    assert len(set(colours.values())) == 3


def test_moves_at_one_time_between_two_engines_are_one_arrow():
    arrows = join_moves(TIMELINE)
    assert sum(arrows.values()) == len(MOVES)
    assert [(a.from_engine, a.to_engine, a.kind, a.at_s, n) for a, n in arrows.items()] == [
        (0, 7, MIGRATED, 8.0, 2),
        (1, 0, MIGRATED, 8.0, 1),
        (1, 7, DEFERRED, 9.0, 1),
        (1, 7, RACED, 9.0, 1),
        (0, 7, RACED, 9.0, 1),
    ]


@pytest.mark.parametrize("num_engines", [1, 2, 40])
def test_an_idle_lane_is_white(num_engines, tmp_path):
    """Find the pixels where only the busy picture has the step's colour. The other must be white
    there."""
    engines = tuple(range(num_engines + 1))
    busy = [Span(engine, Activity.ROLLOUT, "train/2", 0.0, 20.0) for engine in engines]
    picture = pixels(Timeline(0.0, 20.0, engines, tuple(busy)), tmp_path)
    bubbly = pixels(Timeline(0.0, 20.0, engines, tuple(busy[:-1])), tmp_path)
    gone = coloured(picture, MAIN_COLOUR) & ~coloured(bubbly, MAIN_COLOUR)
    assert gone.sum() > 0.25 * coloured(picture, MAIN_COLOUR).sum() / len(engines)
    words = (bubbly[gone] < 0.9).any(axis=-1).mean()
    assert words < 0.05, "only words may be drawn on the white lane"


def test_syncs_restarts_and_moves_are_seen(tmp_path):
    picture = pixels(TIMELINE, tmp_path)
    quiet = pixels(replace(TIMELINE, spans=SPANS[:1], moves=()), tmp_path)
    seen = (ACTIVITIES[Activity.SYNC], ACTIVITIES[Activity.RESTART], LOOKS[DEFERRED], LOOKS[RACED])
    for look in seen:
        assert coloured(picture, look.colour).sum() > 50
        assert not coloured(quiet, look.colour).any()


def test_a_switch_is_seen_and_a_gpu_counts_once(tmp_path):
    """Engine 1 is idle for 2 s with one GPU, and engine 2 for 2 s with two GPUs."""
    assert SWITCHED.bubble_share == pytest.approx(6.0 / 40.0)
    *engines, _ = timeline_rows(SWITCHED)
    assert [(row["switch_s"], row["parked_s"], row["idle_s"]) for row in engines] == [
        (0.0, 10.0, 0.0),
        (0.0, 10.0, 2.0),
        (1.0, 10.0, 2.0),
    ]
    assert [(row["reshaped_in"], row["reshaped_out"]) for row in engines] == [
        (0, 1),
        (0, 0),
        (1, 0),
    ]
    picture, quiet = pixels(SWITCHED, tmp_path), pixels(TIMELINE, tmp_path)
    for activity in (Activity.SWITCH, Activity.PARKED):
        assert coloured(picture, ACTIVITIES[activity].colour).sum() > 50
        assert not coloured(quiet, ACTIVITIES[activity].colour).any()


def test_spans_outside_the_window_are_not_drawn(tmp_path):
    """Spans that are cut to the window give the same bytes."""
    draw_timeline(TIMELINE, tmp_path / "whole.png", "title")
    cut = tuple(
        replace(s, start_s=max(100.0, s.start_s), end_s=min(120.0, s.end_s or 120.0))
        for s in SPANS
        if s.start_s < 120.0 and (s.end_s or 120.0) > 100.0
    )
    draw_timeline(replace(TIMELINE, spans=cut), tmp_path / "cut.png", "title")
    assert (tmp_path / "cut.png").read_bytes() == (tmp_path / "whole.png").read_bytes()


def test_a_window_of_no_time_or_without_anything_can_be_drawn(tmp_path):
    for end_s in (5.0, 6.0):
        empty = Timeline(5.0, end_s, (3,), ())
        draw_timeline(empty, tmp_path / "empty.png", "nothing")


def test_savings_are_drawn_below_the_timeline(tmp_path):
    each = Saving(Technique.DRAFTING, 5.0, 2.0), Saving(Technique.RACING, 1.0, 2.0)
    alone = pixels(TIMELINE, tmp_path)
    with_savings = pixels(TIMELINE, tmp_path, Savings(10.0, 8.0, "x", each))
    assert with_savings.shape[0] > alone.shape[0]
    below = with_savings[alone.shape[0] :]
    for colour in (CLEAR_COLOUR, UNCLEAR_COLOUR):
        assert coloured(below, colour).sum() > 100
    unknown = pixels(TIMELINE, tmp_path, Savings(10.0, unknown="why not"))
    assert np.array_equal(unknown, alone)


def test_the_same_timeline_is_the_same_bytes(tmp_path):
    for name in ("a.png", "b.png"):
        draw_timeline(TIMELINE, tmp_path / name, "title")
    written = (tmp_path / "a.png").read_bytes()
    assert written == (tmp_path / "b.png").read_bytes()
    assert b"matplotlib" not in written.lower()
