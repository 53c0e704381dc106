"""Conversations of the user's environments, over several worker processes.

    answer(sample, turns) ──► is its conversation alive at this turn?
        yes: step             no: reset, the recorded steps again, then step

The same turn of a sample is executed once, and gets the same answer whoever asks. A conversation
whose process was killed is replayed. One that fails is repeated `retries` times.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from engines.environment.process import CallFailed, EnvironmentProcess, ProcessLost
from schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentSetup,
    EnvironmentTask,
    TurnText,
)

MAX_PROCESSES = 8
"""Most processes by default. On fewer cores there is one per core."""
MAX_LOST = 20
"""How often a conversation is replayed because others ended its process."""


class Diverged(Exception):
    """A replayed conversation gave another answer than before."""

    def __init__(self, sample: str, turn: int) -> None:
        super().__init__(
            f"the environment of {sample} gave another answer when turn {turn} was replayed: make "
            "it depend on task.seed alone, or set replays = False in its class"
        )


class EnvironmentFailed(Exception):
    """A conversation has failed for good."""

    def __init__(self, sample: str, turn: int, reason: str) -> None:
        super().__init__(f"the environment of {sample} failed at turn {turn}: {reason}")


def describe(
    config: EnvironmentConfig, surroundings: Mapping[str, str] | None = None
) -> EnvironmentSetup:
    """Import the user's file in a process of its own, and return what it declares. Raise ValueError
    that names the file."""

    async def ask() -> EnvironmentSetup:
        pool = EnvironmentPool(config, surroundings)
        try:
            return await pool.start()
        finally:
            await pool.close()

    # The caller may be in an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(ask())).result()


_Answered = tuple[TurnText, EnvironmentAnswer]
"""A turn with its answer."""


@dataclass
class _Conversation:
    """A conversation that is alive in a process."""

    process: EnvironmentProcess
    num_turns: int = 0
    """Turns that were answered."""


class EnvironmentPool:
    """All conversations of a run's actor."""

    def __init__(
        self, config: EnvironmentConfig, surroundings: Mapping[str, str] | None = None
    ) -> None:
        """`surroundings`: the run's locale variables, used instead of this machine's."""
        self._config = config
        self._surroundings = surroundings
        num = config.processes or min(MAX_PROCESSES, os.cpu_count() or 1)
        self._processes = [EnvironmentProcess(config, surroundings) for _ in range(num)]
        self._starting = [asyncio.Lock() for _ in range(num)]
        self._alive: dict[str, _Conversation] = {}
        self._asked: dict[str, dict[Any, asyncio.Task[Any]]] = {}
        """Calls of each sample by turn, finished ones too."""
        self._setup: EnvironmentSetup | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> EnvironmentSetup:
        """Start a process, and return what the file declares. The others start when they are
        needed. Raise ValueError that names the user's file."""
        self._setup = self._setup or await self._processes[0].start()
        return self._setup

    async def answer(
        self,
        sample: str,
        task: EnvironmentTask,
        turns: Sequence[TurnText],
        recorded: Sequence[EnvironmentAnswer],
    ) -> EnvironmentAnswer:
        """Return the answer to the last of `turns`. `recorded`: the answers to those before.

        Raise Diverged if a replay gives other answers, and EnvironmentFailed if the conversation
        has failed for good.
        """

        async def step(own: _Conversation) -> EnvironmentAnswer:
            return await self._step(sample, own, turns[-1])

        earlier = list(zip(turns[:-1], recorded, strict=True))
        return await self._once(sample, len(turns), task, earlier, step)

    async def end(
        self,
        sample: str,
        task: EnvironmentTask,
        turns: Sequence[TurnText],
        recorded: Sequence[EnvironmentAnswer],
        reason: str,
    ) -> float | None:
        """End a conversation that was cut. Return its score, or None. Raise as `answer` does.

        The last of `turns` was cut, and has no answer in `recorded`. Or it was answered, and there
        is no room for another turn.
        """

        async def end(own: _Conversation) -> float | None:
            return await own.process.call("end", sample, reason=reason)

        earlier = list(zip(turns, recorded, strict=False))
        return await self._once(sample, "end", task, earlier, end)

    async def forget(self, samples: Iterable[str]) -> None:
        """Close these conversations in the background, and drop their answers."""
        for sample in samples:
            self._asked.pop(sample, None)
            if own := self._alive.pop(sample, None):
                self._in_background(self._close(sample, own))

    async def close(self) -> None:
        """End all processes."""
        await asyncio.gather(*(process.close() for process in self._processes))

    async def _once(
        self,
        sample: str,
        key: int | str,
        task: EnvironmentTask,
        earlier: Sequence[_Answered],
        call: Callable[[_Conversation], Awaitable[Any]],
    ) -> Any:
        asked = self._asked.setdefault(sample, {})
        if key not in asked:
            work = self._repeated(sample, task, earlier, call)
            asked[key] = asyncio.create_task(work)
        # Whoever asked first may have been cancelled. The answer is for all.
        return await asyncio.shield(asked[key])

    async def _repeated(
        self,
        sample: str,
        task: EnvironmentTask,
        earlier: Sequence[_Answered],
        call: Callable[[_Conversation], Awaitable[Any]],
    ) -> Any:
        """Call until it succeeds, or has failed too often."""
        reasons: list[str] = []
        num_lost = 0
        while len(reasons) <= self._config.retries:
            try:
                return await call(await self._conversation(sample, task, earlier))
            except ProcessLost as error:
                num_lost += 1
                if error.own or num_lost > MAX_LOST:
                    reasons.append(str(error))
            except CallFailed as error:
                reasons.append(str(error))
            if own := self._alive.pop(sample, None):
                self._in_background(self._close(sample, own))
        raise EnvironmentFailed(sample, len(earlier) + 1, reasons[-1])

    async def _conversation(
        self, sample: str, task: EnvironmentTask, earlier: Sequence[_Answered]
    ) -> _Conversation:
        """Return the conversation after these turns. Replay it unless it is alive there."""
        own = self._alive.get(sample)
        if own and own.process.alive and own.num_turns == len(earlier):
            return own
        assert self._setup is not None, "start() comes first"
        if earlier and not self._setup.replays:
            reason = "it was lost, and its class says replays = False"
            raise EnvironmentFailed(sample, len(earlier) + 1, reason)
        if own := self._alive.pop(sample, None):
            self._in_background(self._close(sample, own))
        own = self._alive[sample] = _Conversation(await self._least_busy())
        own.process.num_conversations += 1
        await own.process.call("reset", sample, task=asdict(task))
        for number, (turn, known) in enumerate(earlier, 1):
            answer = await self._step(sample, own, turn)
            if answer != known:
                raise Diverged(sample, number)
        return own

    async def _step(self, sample: str, own: _Conversation, turn: TurnText) -> EnvironmentAnswer:
        number = own.num_turns + 1
        found = await own.process.call("step", sample, **asdict(turn), number=number)
        own.num_turns = number
        return EnvironmentAnswer(**found | {"messages": tuple(found["messages"])})

    async def _least_busy(self) -> EnvironmentProcess:
        """Return the process with the fewest conversations, started."""
        index = min(range(len(self._processes)), key=lambda i: self._processes[i].num_conversations)
        async with self._starting[index]:
            if not self._processes[index].alive:
                new = self._processes[index] = EnvironmentProcess(self._config, self._surroundings)
                await new.start()
        return self._processes[index]

    async def _close(self, sample: str, own: _Conversation) -> None:
        own.process.num_conversations -= 1
        with suppress(CallFailed, ProcessLost):
            await own.process.call("close", sample)

    def _in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
