"""A run for other tools: its rollouts in Parquet, what its engines did as a trace-event file."""

import json
from pathlib import Path

from engines.report.trace_events import FOLDER, read_timelines, trace_events
from engines.simulate.trace import from_store, write_trace
from engines.store.engine_time import engine_time
from flows.simulate_input import find_trace
from tasks.run_dir import STORE_FILE
from tasks.run_record import is_live


def launch_export(run: str, file: Path | None, events: Path | None, token_ids: bool) -> None:
    """Write what is asked for. Raises ValueError when there is none or nowhere to write."""
    if file is None and events is None:
        raise ValueError(
            "nothing to write: give FILE for the rollouts (Parquet), or --trace FILE.json for what "
            "the engines did"
        )
    for target in (file, events):
        if target and not target.absolute().parent.is_dir():
            raise ValueError(f"{target}: there is no such directory; make it first")
    if file:
        _export_rollouts(run, file, token_ids)
    if events:
        _export_events(run, events)


def _export_rollouts(run: str, file: Path, token_ids: bool) -> None:
    trace = from_store(find_trace(run), token_ids=token_ids)
    write_trace(trace, file)
    print(f"{file}: {len(trace.table):,} rollouts of {len(trace.steps)} steps")


def _export_events(run: str, file: Path) -> None:
    """With the rollouts, unless the run is alive and holds its store."""
    run_dir = find_trace(run).parent
    timelines = read_timelines(run_dir)
    if not timelines:
        raise ValueError(
            f"{run_dir / FOLDER} holds no timeline: the run has rolled out no step yet, or an "
            "earlier version made it"
        )
    live = is_live(run_dir)
    rollouts = [] if live else engine_time(run_dir / STORE_FILE)
    file.write_text(json.dumps(trace_events(timelines, rollouts)))
    without = ", without rollouts as the run is alive" if live else f", {len(rollouts):,} rollouts"
    print(f"{file}: {len(timelines)} steps and validations{without}; open it in ui.perfetto.dev")
