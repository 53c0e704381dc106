"""Timelines: activities of each engine, and moves of requests. Times are seconds of one clock,
which the creator of the timeline names."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Annotated

from pydantic import BeforeValidator

from refrain.schemas.rollout import RequestId
from refrain.schemas.step import EngineShare


class Activity(StrEnum):
    """A kind of work of an engine. The engine is idle the rest of the time."""

    ROLLOUT = "rollout"
    """Has unfinished requests."""
    SYNC = "sync"
    """Loads the weights of a policy version."""
    RESTART = "restart"
    SWITCH = "switch"
    """Takes over GPUs from another layout or from the trainer, or hands them to the trainer."""
    PARKED = "parked"
    """Another layout uses its GPUs. This is neither work nor idle time of the engine."""
    TRAINING = "training"
    """The trainer uses its GPUs. This is work of the GPUs."""


class MoveKind(StrEnum):
    """Kind of a move of a request."""

    MIGRATED = "migrated"
    """It left its engine for another one."""
    DEFERRED = "deferred"
    """It left its engine for the next step."""
    RACED = "raced"
    """It continued, and another engine started a copy."""
    RESHAPED = "reshaped"
    """Its engine's GPUs switched to another layout and took it along."""


def _end(seconds: float | None) -> float:
    """Return infinity for null, as JSON has no infinity."""
    return inf if seconds is None else seconds


@dataclass(slots=True)
class Span:
    """A period of one engine's time."""

    engine: int
    activity: Activity
    label: str
    """The step, as `split/step`."""
    start_s: float
    end_s: Annotated[float, BeforeValidator(_end)] = inf
    """End of the period; infinite while it lasts."""


@dataclass(frozen=True, slots=True)
class MoveRecord:
    """A move of an unfinished request from one engine to another."""

    id: RequestId
    from_engine: int
    to_engine: int
    kind: MoveKind
    at_s: float
    num_tokens: int
    """Response tokens that it had."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A period of a run: all spans of engines that touch it, and the moves in it."""

    start_s: float
    end_s: float
    engines: tuple[int, ...]
    spans: tuple[Span, ...]
    moves: tuple[MoveRecord, ...] = ()
    tp_degrees: Mapping[int, int] = field(default_factory=dict)
    """GPUs of each engine. Engines that are not listed have one."""

    @property
    def window_s(self) -> float:
        return self.end_s - self.start_s

    def moves_in_order(self) -> list[MoveRecord]:
        """Return the moves in order of time, with `at_s` relative to the start of the period."""
        own = (replace(move, at_s=move.at_s - self.start_s) for move in self.moves)
        return sorted(own, key=lambda move: move.at_s)

    def seconds(self, engine: int, *activity: Activity) -> float:
        """Return the seconds that this engine spent on these activities within the period."""
        return sum(
            max(0.0, min(span.end_s, self.end_s) - max(span.start_s, self.start_s))
            for span in self.spans
            if span.engine == engine and span.activity in activity
        )

    def idle_s(self, engine: int) -> float:
        return max(0.0, self.window_s - self.seconds(engine, *Activity))

    @property
    def bubble_share(self) -> float:
        """Share of the GPUs' time in which they were idle."""
        gpus = {engine: self.tp_degrees.get(engine, 1) for engine in self.engines}
        whole = sum(n * (self.window_s - self.seconds(e, Activity.PARKED)) for e, n in gpus.items())
        return sum(n * self.idle_s(e) for e, n in gpus.items()) / whole if whole > 0 else 0.0


class Technique(StrEnum):
    """Technique that may shorten a rollout."""

    DRAFTING = "drafting"
    MIGRATION = "migration"
    """HistoPipe: a request continues on another engine."""
    RACING = "racing"
    SWITCHING = "switching"
    """GPUs switch to another TP degree."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Seconds that a technique saved in one step's rollout."""

    technique: Technique
    saved_s: float
    """Seconds that the rollout would have taken longer without it. Negative if it cost time."""
    uncertainty_s: float
    """Error of the latency model in seconds: |predicted - measured| of this very step as it ran,
    and of the passes without drafts."""

    @property
    def clear(self) -> bool:
        """Whether the saving is larger than its uncertainty."""
        return abs(self.saved_s) >= self.uncertainty_s


@dataclass(frozen=True, slots=True)
class Savings:
    """Seconds saved in one step's rollout; see `engines.accounting.savings`."""

    measured_s: float
    """Seconds from the start of the first request to the end of the last."""
    predicted_s: float | None = None
    """Seconds of the rollout by the latency model. None without a model."""
    source: str = ""
    """Where the latency model comes from, for people."""
    each: tuple[Saving, ...] = ()
    """Saving of each technique that was used."""
    unknown: str = ""
    """Why the savings are unknown although a technique was used, and how to measure them: a
    sentence."""


@dataclass(frozen=True, slots=True)
class RecordedTimeline:
    """A stored timeline. Its clock has no meaning elsewhere, so it comes with the clock's zero."""

    timeline: Timeline
    clock_zero_s: float
    """Unix time at which its clock was 0."""
    shares: tuple[EngineShare, ...] = ()
    """Part of each engine in the step's rollout. Empty before the step's page is drawn."""
    savings: Savings | None = None
    """Saved seconds. None before the step's page is drawn, and if no technique was used."""

    def unix_s(self, at_s: float) -> float:
        return self.clock_zero_s + at_s
