"""Turns of engines and trainer on shared GPUs: who has them, and when they change hands.

    ENGINES ── leave ──► nobody ── enter ──► TRAINER, and back
                 └──── fails ────┴──► nobody, for good

The GPUs change hands when a role asks for them and all work of the present turn is done. Owners
bound their waits, name a process that died or hangs, and free the GPUs of dead processes.

With `rollout.weight_sync: ipc`, weights are handed over on the GPUs. Engines then take memory for
weights during the trainer's turn, but generate nothing before the GPUs change hands.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from enum import Enum
from typing import Protocol


class Role(Enum):
    ENGINES = "engines"
    TRAINER = "trainer"


class TurnFailed(RuntimeError):
    """An earlier hand-over of the GPUs failed."""


class Owner(Protocol):
    """Processes that own the GPUs during their turn. An exception here ends the run."""

    async def leave_gpus(self) -> None:
        """Free the GPU memory."""
        ...

    async def enter_gpus(self) -> None:
        """Take the GPU memory that is needed."""
        ...


class Turns:
    """The turns on all GPUs of a run. All processes of an owner work at the same time."""

    # Without __dict__, because Prefect records a flow's arguments as deeply as it can look.
    __slots__ = ("_failure", "_has", "_moved", "_num_at_work", "_owners")

    def __init__(self, owners: Mapping[Role, Owner], first: Role) -> None:
        """`first`: the role that has them now. Without owners each role has GPUs of its own, and
        nobody waits."""
        assert not owners or first in owners
        self._owners = owners
        self._has: Role | None = first
        self._num_at_work = 0
        self._failure: BaseException | None = None
        self._moved = asyncio.Event()

    @property
    def shared(self) -> bool:
        return bool(self._owners)

    @property
    def has(self) -> Role | None:
        """Role that has the GPUs. None during a hand-over, and for good after one has failed."""
        return self._has

    @asynccontextmanager
    async def of(self, role: Role) -> AsyncGenerator[None]:
        """Hold a turn. Several callers may share it. Raise the owners' exceptions if the hand-over
        fails now, or `TurnFailed` if it failed before."""
        if not self._owners:
            yield
            return
        await self._take(role)
        try:
            yield
        finally:
            self._num_at_work -= 1
            self._tell()

    async def _take(self, role: Role) -> None:
        while self._has is not role:
            if self._failure:
                raise TurnFailed(
                    f"the GPUs have no owner after a failed hand-over: {self._failure}"
                ) from self._failure
            if self._has and not self._num_at_work:
                await self._hand_over(self._has, role)
            else:
                await self._moved.wait()
        self._num_at_work += 1

    async def _hand_over(self, before: Role, after: Role) -> None:
        self._has = None
        try:
            await self._owners[before].leave_gpus()
            await self._owners[after].enter_gpus()
            self._has = after
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._tell()

    def _tell(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
