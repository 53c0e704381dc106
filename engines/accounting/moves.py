"""A step's moves as a table. Pure."""

from typing import Any

from schemas.timeline import Timeline

MAX_ROWS = 5000
"""Rows of one step's table; further moves are in the timeline's counts."""


def move_rows(timeline: Timeline) -> list[dict[str, Any]]:
    """Rows in order of time: the request, its move, from where to where, in seconds since the
    window of the timeline began, with so many response tokens."""
    moves = sorted(timeline.moves, key=lambda move: move.at_s)[:MAX_ROWS]
    return [
        {
            "request": str(move.id),
            "kind": str(move.kind),
            "from_engine": move.from_engine,
            "to_engine": move.to_engine,
            "at_s": round(move.at_s - timeline.start_s, 4),
            "num_tokens": move.num_tokens,
        }
        for move in moves
    ]
