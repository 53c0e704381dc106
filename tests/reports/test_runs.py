"""Reward curves in the terminal, and the view of a live run."""

import io

import pytest
from rich.console import Console

from refrain.engines.reports.progress import TerminalProgress, clock, left_text
from refrain.engines.reports.runs import live_view, reward_curve, rolling_text, sparkline
from refrain.tasks.run.record import read_run
from tests.flows.run_dirs import ROLLING, make_run, progress


@pytest.mark.parametrize(
    ("values", "curve"),
    [
        ([], ""),
        ([0.5], "▁"),
        ([0.5, 0.5], "▁▁"),
        ([0.0, 1.0, 0.5], "▁█▅"),
        ([-7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0], "▁▂▃▄▅▆▇█"),
    ],
)
def test_a_curve_goes_from_the_lowest_to_the_highest(values: list[float], curve: str) -> None:
    assert sparkline(values) == curve


def test_a_long_curve_is_averaged_into_its_columns() -> None:
    assert sparkline([0.0, 0.0, 1.0, 1.0, 0.0, 2.0], num_columns=3) == "▁██"
    assert len(sparkline([float(i % 7) for i in range(1000)])) == 60
    assert reward_curve([0.25, 0.5]) == "0.250 ▁█ 0.500"


def test_live_view_shows_the_current_phase(tmp_path) -> None:
    run_dir = make_run(tmp_path, "live", (0.5, 0.75), progress(rolling=ROLLING, started_s=1e9))
    console = Console(width=140, markup=False, record=True)
    console.print(live_view(read_run(run_dir), 1e9 + 5.0))
    shown = console.export_text()
    assert "live  step 2/4  00:01:10  train step 3: rolling out" in shown
    assert (
        "train step 3: 32/96 rollouts, 500 tokens/s, 75% of drafts accepted, 50% of engines idle"
    ) in shown
    assert "0.500 ▁█ 0.750" in shown


@pytest.mark.parametrize(
    ("left_s", "text"),
    [
        (None, ""),
        (0.2, ", about 0 s left"),
        (40.4, ", about 40 s left"),
        (600.0, ", about 10 min left"),
    ],
)
def test_the_end_of_a_stage_is_shown_once_it_is_predicted(left_s: float | None, text: str) -> None:
    rolling = ROLLING.model_copy(update={"left_s": left_s})
    assert left_text(rolling) == text
    assert rolling_text(rolling) == rolling_text(ROLLING) + text
    terminal = io.StringIO()
    shown = TerminalProgress(
        Console(file=terminal, force_terminal=True, highlight=False, width=140)
    )
    shown.phase("rolling out")
    shown.rolling(rolling)
    shown.close()
    assert f"500 tokens in flight, 75% of drafts accepted{text}" in terminal.getvalue()
    assert ("left" in terminal.getvalue()) == bool(text)


def test_hours_may_be_many() -> None:
    assert (clock(59.9), clock(3661), clock(100 * 3600)) == ("00:00:59", "01:01:01", "100:00:00")
