"""Tables of a time window of a run: the engines' activities and the moves of requests."""

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from refrain.schemas.timeline import Activity, Span, Timeline

MOVE_COLUMNS = (
    *("migrated_in", "migrated_out", "deferred_out", "raced_in", "raced_out"),
    *("reshaped_in", "reshaped_out"),
)
"""Counts of moves in a table. A request in `raced_out` also continues on its own engine."""
MAX_MOVES = 5000
"""Most rows of a step's table of moves. The counts include further moves."""


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
