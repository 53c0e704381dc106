"""Export a run to other tools: rollouts as Parquet, its engines' work as trace events or a page."""

import json
from pathlib import Path
from typing import Any

from refrain.engines.accounting.step_requests import step_requests
from refrain.engines.reports.timeline_page import timeline_page
from refrain.engines.reports.trace_events import FOLDER, read_timeline, read_timelines, trace_events
from refrain.engines.simulate.trace import from_store, write_trace
from refrain.engines.store.open_database import explain_damage
from refrain.engines.store.store import open_read_only
from refrain.flows.output_file import HTML, JSON, PARQUET, check_output, write_output, writing
from refrain.flows.simulate_input import find_trace
from refrain.schemas.keys import stage_name
from refrain.schemas.rollout import Split
from refrain.tasks.run.run_dir import STORE_FILE, is_live, read_config
from refrain.tasks.run.timeline import gpus_of


def launch_export(
    run: str,
    file: Path | None,
    events: Path | None,
    token_ids: bool,
    page: tuple[int, Path] | None = None,
) -> None:
    """Write the requested files. `page`: step and file. Raise ValueError when no file is given or
    a file cannot be written."""
    if file is None and events is None and page is None:
        raise ValueError(
            "nothing to write: give FILE for the rollouts (Parquet), --trace FILE.json for the "
            "engines' work, or --timeline STEP FILE.html for a page about one step"
        )
    for target, kind in ((file, PARQUET), (events, JSON), (page and page[1], HTML)):
        check_output(target, kind)
    if file:
        _export_rollouts(run, file, token_ids)
    if events:
        _export_events(run, events)
    if page:
        _export_page(run, *page)


def _export_rollouts(run: str, file: Path, token_ids: bool) -> None:
    trace = from_store(find_trace(run), token_ids=token_ids)
    with writing(file) as unfinished:
        write_trace(trace, unfinished)
    print(f"{file}: {len(trace.table):,} rollouts of {len(trace.steps)} steps")


def _export_events(run: str, file: Path) -> None:
    """Write the engines' timelines. Add the rollouts, unless the run is live: then it holds its
    store."""
    run_dir = find_trace(run).parent
    timelines = read_timelines(run_dir)
    if not timelines:
        raise ValueError(
            f"{run_dir / FOLDER} has no timeline: the run has finished no rollout stage yet, or "
            "an earlier version of refrain made it"
        )
    rollouts: list[dict[str, Any]] = []
    live = is_live(run_dir)
    if not live:
        file_of_store = run_dir / STORE_FILE
        with explain_damage(file_of_store), open_read_only(file_of_store) as store:
            rollouts = store.engine_times()
    write_output(file, json.dumps(trace_events(timelines, rollouts)))
    without = ", without rollouts: the run is live" if live else f", {len(rollouts):,} rollouts"
    print(f"{file}: {len(timelines)} steps and validations{without}; open it in ui.perfetto.dev")


def _export_page(run: str, step: int, file: Path) -> None:
    """Write a step's timeline page. Leave out requests if the run is live: then it holds its
    store."""
    run_dir = find_trace(run).parent
    recorded = read_timeline(run_dir, stage_name(Split.TRAIN, step))
    rows: list[dict[str, Any]] = []
    live = is_live(run_dir)
    if not live:
        file_of_store = run_dir / STORE_FILE
        with explain_damage(file_of_store), open_read_only(file_of_store) as store:
            rows = store.timed_rollouts(Split.TRAIN, step).to_pylist()
    requests = step_requests(recorded, Split.TRAIN, step, rows)
    gpus = gpus_of(read_config(run_dir))
    title = f"{run_dir.name}: train step {step}"
    write_output(file, timeline_page(recorded, requests, gpus, title))
    without = ", without requests: the run is live" if live else f", {len(requests):,} requests"
    print(f"{file}: step {step}{without}; open it in a browser")
