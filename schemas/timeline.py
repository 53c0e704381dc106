"""Timelines: each engine's activities and the moves of requests. Times are seconds of one clock,
which the giver names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Annotated

from pydantic import BeforeValidator

from schemas.rollout import RequestId
from schemas.step import EngineShare


class Activity(StrEnum):
    """One kind of work of an engine; the rest of its time it is idle."""

    ROLLOUT = "rollout"
    """Has unfinished requests."""
    SYNC = "sync"
    """Takes the weights of a policy version."""
    RESTART = "restart"
    SWITCH = "switch"
    """Takes over GPUs from another layout or from the trainer, or leaves them to the trainer."""
    PARKED = "parked"
    """Its GPUs are in another layout: neither work nor idleness of this engine."""
    TRAINING = "training"
    """The trainer has its GPUs: work of theirs."""


class MoveKind(StrEnum):
    """Fate of a request that was moved."""

    MIGRATED = "migrated"
    """It left its engine for another one."""
    DEFERRED = "deferred"
    """It left its engine for the next step."""
    RACED = "raced"
    """It went on, and on another engine too."""
    RESHAPED = "reshaped"
    """Its engine's GPUs went over to another layout, and it with them."""


def _end(seconds: float | None) -> float:
    """JSON has no infinity: there it is null."""
    return inf if seconds is None else seconds


@dataclass(slots=True)
class Span:
    """A stretch of one engine's time."""

    engine: int
    activity: Activity
    label: str
    """The step, as `split/step`."""
    start_s: float
    end_s: Annotated[float, BeforeValidator(_end)] = inf
    """End of the stretch; infinite while it goes on."""


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """An unfinished request that went from one engine to another."""

    id: RequestId
    from_engine: int
    to_engine: int
    kind: MoveKind
    at_s: float
    num_tokens: int
    """Response tokens that it had."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A stretch of a run: every engine's spans that touch it, and the moves in it."""

    start_s: float
    end_s: float
    engines: tuple[int, ...]
    spans: tuple[Span, ...]
    moves: tuple[MoveRecord, ...] = ()
    tp_degrees: Mapping[int, int] = field(default_factory=dict)
    """GPUs of each engine; one where nothing is said."""

    @property
    def window_s(self) -> float:
        return self.end_s - self.start_s

    def moves_in_order(self) -> list[MoveRecord]:
        """Moves in order of time, with `at_s` since the window began."""
        own = (replace(move, at_s=move.at_s - self.start_s) for move in self.moves)
        return sorted(own, key=lambda move: move.at_s)

    def seconds(self, engine: int, *activity: Activity) -> float:
        """Seconds that this engine spent on these activities, within the stretch."""
        return sum(
            max(0.0, min(span.end_s, self.end_s) - max(span.start_s, self.start_s))
            for span in self.spans
            if span.engine == engine and span.activity in activity
        )

    def idle_s(self, engine: int) -> float:
        return max(0.0, self.window_s - self.seconds(engine, *Activity))

    @property
    def bubble_share(self) -> float:
        """Share of the GPUs' time in which they had nothing to do."""
        gpus = {engine: self.tp_degrees.get(engine, 1) for engine in self.engines}
        whole = sum(n * (self.window_s - self.seconds(e, Activity.PARKED)) for e, n in gpus.items())
        return sum(n * self.idle_s(e) for e, n in gpus.items()) / whole if whole > 0 else 0.0


class Technique(StrEnum):
    """Technique that may make a rollout shorter."""

    DRAFTING = "drafting"
    MIGRATION = "migration"
    """HistoPipe's: a request goes on on another engine."""
    RACING = "racing"
    SWITCHING = "switching"
    """GPUs go over to another TP degree."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Seconds that a technique saved in one step's rollout."""

    technique: Technique
    saved_s: float
    """Seconds longer that the rollout would have taken without it; below 0 it cost time."""
    uncertainty_s: float
    """Error of the same model in seconds, on this very step, |predicted as it was - measured|, and
    on the passes that were made without drafts."""

    @property
    def clear(self) -> bool:
        """Whether the saving can be told from none."""
        return abs(self.saved_s) >= self.uncertainty_s


@dataclass(frozen=True, slots=True)
class Savings:
    """Seconds saved in one step's rollout; see `engines.accounting.savings`."""

    measured_s: float
    """Seconds from the first request's start to the last one's end."""
    predicted_s: float | None = None
    """Seconds of the rollout by the latency model; None where there is none."""
    source: str = ""
    """Origin of the latency model, for people."""
    each: tuple[Saving, ...] = ()
    """Saving of each technique that acted."""
    unknown: str = ""
    """Why nothing is known, though something acted, and how to know it: a sentence."""


@dataclass(frozen=True, slots=True)
class RecordedTimeline:
    """A timeline as it is kept: its clock means nothing to others."""

    timeline: Timeline
    clock_zero_s: float
    """Unix time at which its clock was 0."""
    shares: tuple[EngineShare, ...] = ()
    """Part of each engine in the step's rollout; none before the step was drawn."""
    savings: Savings | None = None
    """Saved seconds; None before the step was drawn, and where no technique acted."""

    def unix_s(self, at_s: float) -> float:
        return self.clock_zero_s + at_s
