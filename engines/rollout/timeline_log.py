"""Record of the engines' activities over time, and of the requests that moved."""

from collections.abc import Collection
from dataclasses import replace

from refrain.engines.rollout.tracked_engine import TrackedEngine, now_s, num_response_tokens
from refrain.schemas.rollout import RolloutRequest
from refrain.schemas.timeline import MoveKind, MoveRecord, Timeline


class TimelineLog:
    """Moves and engine spans on the event loop's clock, kept until `timeline` returns them."""

    def __init__(self, engines: Collection[TrackedEngine]) -> None:
        self._engines = engines
        self._moves: list[MoveRecord] = []

    def note(
        self, kind: MoveKind, request: RolloutRequest, origin: TrackedEngine, target: TrackedEngine
    ) -> None:
        """Note a move."""
        num_tokens = num_response_tokens(request)
        self._moves.append(
            MoveRecord(request.id, origin.index, target.index, kind, now_s(), num_tokens)
        )

    def timeline(self, start_s: float, end_s: float, kept_s: float) -> Timeline:
        """Return the timeline between two times. Delete records from before `kept_s`."""
        for tracked in self._engines:
            tracked.spans = [s for s in tracked.spans if s.end_s > kept_s]
        engines = [m for m in self._engines if m.spans or not m.gone]
        self._moves = [move for move in self._moves if move.at_s > kept_s]
        spans = [span for tracked in engines for span in tracked.spans if span.end_s > start_s]
        return Timeline(
            start_s=start_s,
            end_s=end_s,
            engines=tuple(tracked.index for tracked in engines),
            spans=tuple(replace(span) for span in spans if span.start_s < end_s),
            moves=tuple(move for move in self._moves if start_s < move.at_s <= end_s),
            tp_degrees={tracked.index: tracked.engine.tp_degree for tracked in engines},
        )
