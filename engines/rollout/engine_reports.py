"""Reports about engines that arrive in a fleet's inbox."""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from refrain.engines.rollout.interface import EngineEvents
from refrain.schemas.rollout import RolloutRequest, SavedKV


@dataclass(frozen=True, slots=True)
class Synced:
    """Report that an engine has the weights of its stage."""

    canary_error: float | None
    """Largest error of the canaries. None if the engine already had the weights."""
    sync_s: float


class Refreshed(Synced):
    """Report that a parked engine has the weights of its pool's stage."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Report that an engine has copied requests, has saved keys and values ahead, or is ready to
    load saved ones."""

    of: object
    """Switch or `Preparation` that the order belongs to."""
    saved: SavedKV | None = None
    copies: tuple[RolloutRequest, ...] = ()
    """Copies to race with."""


class Signal(Enum):
    QUEUED = "a stage has come"
    WOKEN = "an engine has its GPUs again"
    PARKED = "an engine has left its GPUs to others"
    SUBMITTED = "an engine has the copies that it races"
    RESTARTED = "an engine is there again, empty"


@dataclass(frozen=True, slots=True)
class Fatal:
    """Report that an engine cannot be restarted."""

    error: Exception


EngineReport = EngineEvents | Signal | Synced | Copied | Fatal | Exception


class Inbox(asyncio.Queue[tuple[int, EngineReport]]):
    """Reports with the index of their engine, in the order of arrival."""

    _queue: deque[tuple[int, EngineReport]]

    def next_events(self) -> Iterator[tuple[int, EngineEvents]]:
        """Return the events at the head, up to a report of another kind. They stay in the inbox."""
        for index, report in self._queue:
            if not isinstance(report, EngineEvents):
                return
            yield index, report
