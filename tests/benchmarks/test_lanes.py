"""Plots of engines over time, by drafter."""

from matplotlib.image import imread

from refrain.benchmarks.lanes import LaneRow, LaneSpan, colours_of, draw_lanes, pauses


def spans(engine, *parts):
    return tuple(LaneSpan(engine, *part) for part in parts)


SPANS = (
    *spans(0, (0.0, 4.0, 256, "small"), (4.0, 10.0, 3, "small")),
    *spans(1, (0.0, 3.0, 256, "small"), (5.0, 9.0, 2, "large"), (9.0, 9.5, 1, "n-gram")),
    *spans(2, (0.0, 8.0, 10, "")),
    *spans(3, (0.0, 12.0, 10, "small")),
)


def test_an_engine_is_freed_at_the_end_and_where_it_pauses():
    assert pauses(SPANS[2:5], 0.1) == ([3.0, 9.5], [5.0])
    assert pauses(SPANS[2:5], 5.0) == ([9.5], [])
    assert pauses((), 0.1) == ([], [])


def test_every_drafter_has_a_colour_of_its_own():
    colours = colours_of(SPANS)
    assert set(colours) == {"", "small", "large", "n-gram"}
    assert len(set(colours.values())) == 4


def test_rows_are_as_long_as_their_slowest_engine(tmp_path):
    row = LaneRow("best-of-N", (2, 0, 3), SPANS)
    assert row.end_s == 12.0
    empty = LaneRow("nothing", (), ())
    draw_lanes([row, row], tmp_path / "two.png", "SIMULATION")
    draw_lanes([row], tmp_path / "one.png", "SIMULATION")
    two, one = (imread(tmp_path / name) for name in ("two.png", "one.png"))
    assert two.shape[0] > one.shape[0]
    # The picture has blue, orange and green.
    assert len({tuple(pixel) for pixel in one.reshape(-1, one.shape[-1])[::7].round(1)}) > 4
    assert empty.end_s == 0.0
