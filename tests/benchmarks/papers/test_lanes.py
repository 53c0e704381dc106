"""Plots of lanes: the drafter of each engine over time, and the TP degree of each GPU."""

from matplotlib.image import imread

from benchmarks.papers.pat import TP_DEGREES
from benchmarks.papers.present.lanes import (
    LaneRow,
    LaneSpan,
    colours_of,
    draw_lanes,
    pauses,
    pick_lanes,
)
from benchmarks.papers.present.switching import COLOURS


def spans(engine, *parts):
    return tuple(LaneSpan(engine, *part) for part in parts)


SPANS = (
    *spans(0, (0.0, 4.0, 256, "small"), (4.0, 10.0, 3, "small")),
    *spans(1, (0.0, 3.0, 256, "small"), (5.0, 9.0, 2, "large"), (9.0, 9.5, 1, "n-gram")),
    *spans(2, (0.0, 8.0, 10, "")),
    *spans(3, (0.0, 12.0, 10, "small")),
)


def test_the_first_to_be_freed_and_the_slowest_are_shown():
    assert pick_lanes(SPANS, 3) == (2, 0, 3)
    assert pick_lanes(SPANS, 9) == (2, 1, 0, 3)
    assert pick_lanes(()) == ()


def test_an_engine_is_freed_at_the_end_and_where_it_pauses():
    assert pauses(SPANS[2:5], 0.1) == ([3.0, 9.5], [5.0])
    assert pauses(SPANS[2:5], 5.0) == ([9.5], [])
    assert pauses((), 0.1) == ([], [])


def test_every_drafter_has_a_colour_of_its_own():
    colours = colours_of(SPANS)
    assert set(colours) == {"", "small", "large", "n-gram"}
    assert len(set(colours.values())) == 4


def test_rows_are_as_long_as_their_slowest_engine(tmp_path):
    row = LaneRow("best-of-N", pick_lanes(SPANS, 3), SPANS)
    assert row.end_s == 12.0
    empty = LaneRow("nothing", (), ())
    draw_lanes([row, row], tmp_path / "two.png", "SIMULATION")
    draw_lanes([row], tmp_path / "one.png", "SIMULATION")
    two, one = (imread(tmp_path / name) for name in ("two.png", "one.png"))
    assert two.shape[0] > one.shape[0]
    # The picture has blue, orange and green.
    assert len({tuple(pixel) for pixel in one.reshape(-1, one.shape[-1])[::7].round(1)}) > 4
    assert empty.end_s == 0.0


def test_every_tp_degree_has_a_colour_of_its_own():
    spans = tuple(LaneSpan(0, 0.0, 1.0, 2, f"TP {tp}") for tp in (8, 2))
    assert list(colours_of(spans, COLOURS)) == ["TP 2", "TP 8"]
    assert list(COLOURS) == [f"TP {tp}" for tp in TP_DEGREES]
    assert len(set(COLOURS.values())) == len(TP_DEGREES)
