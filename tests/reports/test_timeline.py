"""Tables of a timeline, and the bars and arrows that its page draws."""

import pytest

from refrain.engines.reports.timeline import timeline_rows
from refrain.engines.reports.timeline_page import clip_spans, join_moves
from refrain.schemas.rollout import RequestId, Split
from refrain.schemas.timeline import Activity, MoveKind, MoveRecord, Span, Timeline

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


def test_bars_fill_the_window_but_for_idle_time():
    bars = clip_spans(TIMELINE)
    assert all(0.0 <= bar.start_s < bar.end_s <= 20.0 for bar in bars)
    for row in timeline_rows(TIMELINE)[:-1]:
        own = [bar for bar in bars if bar.engine == row["engine"]]
        assert sum(bar.end_s - bar.start_s for bar in own) == 20.0 - row["idle_s"]


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


def test_a_gpu_of_two_layouts_counts_once():
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
