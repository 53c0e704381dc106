"""News of engines, as they come to the inbox of a fleet."""

from dataclasses import dataclass
from enum import Enum

from engines.rollout.interface import EngineEvents
from schemas.rollout import SavedKV


@dataclass(frozen=True, slots=True)
class Synced:
    """An engine has the weights of its stage."""

    canary_error: float | None
    """Largest error of the canaries; None when the engine had the weights before."""
    sync_s: float


class Refreshed(Synced):
    """A parked engine has the weights of the stage that its pool is at."""


@dataclass(frozen=True, slots=True)
class Copied:
    """An engine has saved keys and values ahead, or has made ready what others saved."""

    of: object
    """The switch that it is a part of, as the order said."""
    saved: SavedKV | None = None


class Signal(Enum):
    QUEUED = "a stage has come"
    WOKEN = "an engine has its GPUs again"
    PARKED = "an engine has left its GPUs to others"
    RESTARTED = "an engine is there again, empty"


@dataclass(frozen=True, slots=True)
class Fatal:
    """An engine cannot be brought up again."""

    error: Exception


News = EngineEvents | Signal | Synced | Copied | Fatal | Exception
