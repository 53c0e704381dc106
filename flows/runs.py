"""Show runs in the terminal: `refrain runs` and `refrain show`."""

import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from refrain.engines.reports.progress import step_line
from refrain.engines.reports.runs import (
    RunRecord,
    RunState,
    live_view,
    print_run,
    print_runs,
    rolling_text,
)
from refrain.tasks.run.find import find_run
from refrain.tasks.run.record import list_runs, read_run

LOOK_EVERY_S = 1.0
"""Seconds between two reads. A run writes its progress as often."""
NEXT_TRY_S = 30.0
"""Seconds from a crash to the start of the next try, at most."""
ROLLING_EVERY_S = 10.0
"""Seconds between two lines about the same rollouts, when the output is not a terminal."""
PLAIN_COLUMNS = 140
NUM_ROWS = 20
"""Steps to show by default."""


def launch_runs(runs_dir: Path) -> None:
    """Print all runs. Raise ValueError when there is no such directory."""
    records = list_runs(runs_dir)
    if records:
        print_runs(records, _console(), time.time())
    else:
        print(f"no run in {runs_dir} yet; `refrain train` starts one")


def launch_show(run: str, runs_dir: Path, follow: bool, show_all: bool) -> None:
    """Print a run. Raise ValueError when there is no such run."""
    run_dir, console = find_run(run, runs_dir), _console()
    if follow:
        _follow(run_dir, console)
    print_run(read_run(run_dir), console, time.time(), None if show_all else NUM_ROWS)


def _follow(run_dir: Path, console: Console) -> None:
    """Show a run until it ends or the user presses Ctrl-C. Neither affects the run."""
    try:
        if console.is_terminal:
            _follow_live(run_dir, console)
        else:
            _follow_lines(run_dir, console)
    except KeyboardInterrupt:
        console.print("stopped watching")


def _follow_live(run_dir: Path, console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for record in _while_live(run_dir):
            live.update(live_view(record, time.time()), refresh=True)


def _follow_lines(run_dir: Path, console: Console) -> None:
    """Print a line for each new step and phase, and now and then for the current rollouts."""
    last_step, last_phase, told_s = None, "", 0.0
    for record in _while_live(run_dir):
        progress = record.progress
        assert progress is not None
        for step in record.steps:
            if last_step is not None and step.step > last_step:
                console.print(step_line(step, progress.num_steps), soft_wrap=True)
        last_step = record.last_step
        if progress.phase != last_phase:
            console.print(progress.phase, soft_wrap=True)
            last_phase, told_s = progress.phase, time.monotonic()
        elif progress.rolling and time.monotonic() - told_s > ROLLING_EVERY_S:
            console.print(rolling_text(progress.rolling), soft_wrap=True)
            told_s = time.monotonic()


def _while_live(run_dir: Path) -> Iterator[RunRecord]:
    """Yield records of a live run once a second, as soon as it has written its progress."""
    while (record := read_run(run_dir)).live or _goes_on(record):
        if record.progress:
            yield record
        time.sleep(LOOK_EVERY_S)


def _goes_on(record: RunRecord) -> bool:
    """Return whether the run is between a crash and the next try."""
    just_now = record.crashes and time.time() - record.crashes[-1].at_s < NEXT_TRY_S
    return bool(just_now) and record.state is RunState.FAILED


def _console() -> Console:
    """Return a console. When the output is not a terminal, make it wide enough for a table."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    return console
