"""Export the engines' activities as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

A run writes the timeline of each step to `timelines/SPLIT-STEP.json` in its directory.
`trace_events` joins them into one trace-event file. Each engine is a process with a lane of its
activities, and its rollouts below if they are known. Arrows show moves.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from refrain.engines.durable import write_durably
from refrain.engines.user_files import first_problem, read_bytes
from refrain.schemas.timeline import Activity, RecordedTimeline

FOLDER = "timelines"
_ADAPTER = TypeAdapter(RecordedTimeline)
Event = dict[str, Any]


def write_timeline(run_dir: Path, name: str, recorded: RecordedTimeline) -> None:
    """Write a timeline. Overwrite one of the same name, which is from an earlier attempt at the
    step."""
    file = run_dir / FOLDER / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    write_durably(file, _ADAPTER.dump_json(recorded).decode())


def read_timeline(run_dir: Path, name: str) -> RecordedTimeline:
    """Return the timeline of this name. Raises ValueError when there is none."""
    file = run_dir / FOLDER / f"{name}.json"
    if not file.is_file():
        there = ", ".join(sorted(found.stem for found in file.parent.glob("[!.]*.json"))) or "none"
        raise ValueError(f"{file} does not exist. Available timelines: {there}")
    return _read(file)


def read_timelines(run_dir: Path) -> list[RecordedTimeline]:
    """Return all timelines in order of time. Runs of earlier versions have none."""
    files = sorted((run_dir / FOLDER).glob("[!.]*.json"))
    found = map(_read, files)
    return sorted(found, key=lambda recorded: recorded.unix_s(recorded.timeline.start_s))


def _read(file: Path) -> RecordedTimeline:
    content = read_bytes(file)
    try:
        return _ADAPTER.validate_json(content)
    except ValidationError as error:
        raise ValueError(
            f"{file} is damaged ({first_problem(error)}). Move it away to read the other timelines"
        ) from error


def trace_events(
    timelines: Sequence[RecordedTimeline], rollouts: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the file's content. `rollouts` have `name`, `engine`, `started_s`, `finished_s` and
    `waits` (Unix times) and `args`. Times are microseconds since the first timeline or rollout
    began."""
    rollouts = list(rollouts)
    begin_s = min(
        [
            *(recorded.unix_s(recorded.timeline.start_s) for recorded in timelines),
            *(rollout["started_s"] for rollout in rollouts),
        ],
        default=0.0,
    )
    engines = {engine for recorded in timelines for engine in recorded.timeline.engines}
    engines |= {rollout["engine"] for rollout in rollouts}
    events = [
        *(event for engine in sorted(engines) for event in _names(engine)),
        *_spans(timelines, begin_s),
        *_moves(timelines, begin_s),
        *_rollouts(rollouts, begin_s),
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(engine: int) -> Iterator[Event]:
    meta = {"ph": "M", "pid": engine, "tid": 0}
    yield meta | {"name": "process_name", "args": {"name": f"engine {engine}"}}
    yield meta | {"name": "process_sort_index", "args": {"sort_index": engine}}
    yield meta | {"name": "thread_name", "args": {"name": "what it does"}}


def _spans(timelines: Sequence[RecordedTimeline], begin_s: float) -> Iterator[Event]:
    """Yield each span once. A span that continues past a step's end is in two timelines."""
    ends: dict[tuple[int, Activity, str, float], float] = {}
    for recorded in timelines:
        for span in recorded.timeline.spans:
            end_s = span.end_s if span.end_s < inf else recorded.timeline.end_s
            key = (span.engine, span.activity, span.label, recorded.unix_s(span.start_s))
            ends[key] = max(recorded.unix_s(end_s), ends.get(key, 0.0))
    for (engine, activity, label, start_s), end_s in ends.items():
        yield {
            "ph": "X",
            "pid": engine,
            "tid": 0,
            "cat": str(activity),
            "name": f"{activity} {label}",
            "ts": _us(start_s - begin_s),
            "dur": _us(end_s - start_s),
        }


def _moves(timelines: Sequence[RecordedTimeline], begin_s: float) -> Iterator[Event]:
    """Yield an arrow for each move, and a mark at its start."""
    moves = {
        (recorded.unix_s(move.at_s), move)
        for recorded in timelines
        for move in recorded.timeline.moves
    }
    for number, (at_s, move) in enumerate(sorted(moves, key=lambda found: found[0])):
        common = {"cat": "move", "name": str(move.kind), "tid": 0, "ts": _us(at_s - begin_s)}
        args = {"request": str(move.id), "tokens": move.num_tokens}
        arrow = common | {"id": number}
        yield common | {"ph": "i", "s": "t", "pid": move.from_engine, "args": args}
        yield arrow | {"ph": "s", "pid": move.from_engine}
        yield arrow | {"ph": "f", "bp": "e", "pid": move.to_engine}


def _rollouts(rollouts: Iterable[Mapping[str, Any]], begin_s: float) -> Iterator[Event]:
    """Yield rollouts as asynchronous slices, with their waits for an environment inside. Viewers
    spread these over as many rows as needed."""
    for number, rollout in enumerate(rollouts):
        common = {"cat": "rollout", "name": rollout["name"], "id": number, "tid": 0}
        common["pid"] = rollout["engine"]
        started_us = _us(rollout["started_s"] - begin_s)
        yield common | {"ph": "b", "ts": started_us, "args": rollout["args"]}
        for from_s, to_s in rollout["waits"]:
            wait = common | {"name": "waits for its environment"}
            yield wait | {"ph": "b", "ts": _us(from_s - begin_s)}
            yield wait | {"ph": "e", "ts": _us(to_s - begin_s)}
        yield common | {"ph": "e", "ts": _us(rollout["finished_s"] - begin_s)}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
