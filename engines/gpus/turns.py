"""Turns on GPUs that engines and trainer share: who has them, and when they change hands.

    ENGINES ── leave ──► nobody ── enter ──► TRAINER, and back
                 └──── fails ────┴──► nobody, for good

They change hands when somebody asks for them and all who work in the present turn are done. Owners
bound what they do, name who died or hangs, and free what was the dead's.

In the trainer's turn engines take memory for weights alone, where it hands them over on the GPUs
(`rollout.weights: ipc`): nobody generates before they change hands.
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
    """The GPUs did not change hands some time before."""


class Owner(Protocol):
    """Processes that have the GPUs in their turn. What is raised here ends the run."""

    async def leave_gpus(self) -> None:
        """Free their memory."""
        ...

    async def enter_gpus(self) -> None:
        """Take what is needed of it."""
        ...


class Turns:
    """The GPUs of a run as one, since all processes of an owner work at the same time."""

    # Without a dictionary: Prefect writes down what a flow is given as far as it can look into it.
    __slots__ = ("_failure", "_has", "_moved", "_num_at_work", "_owners")

    def __init__(self, owners: Mapping[Role, Owner], first: Role) -> None:
        """`first`: who has them now. No owners: each has GPUs of its own, and nobody waits."""
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
        """Who has the GPUs; None while they change hands, and once that has failed."""
        return self._has

    @asynccontextmanager
    async def of(self, role: Role) -> AsyncGenerator[None]:
        """A turn, which several may share. Raises what its owners raise while the GPUs change
        hands, and `TurnFailed` after that."""
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
                raise TurnFailed(f"the GPUs are nobody's: {self._failure}") from self._failure
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
