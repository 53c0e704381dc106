"""Worker processes of a node, and the conversations that live in them.

    answer(sample, turns) ── known? ──► its answer
             │ no: one call at a time for each conversation
             ▼
    where it lives ──► step ──► answer
             │ nowhere, or at another turn: reset, then the recorded turns (replay)
             ▼
    the process with the fewest calls

A failed call is tried again in a conversation rebuilt by replay. When a process ends, the call to
blame counts as failed, and the other conversations of that process are rebuilt for free. If several
calls ran and nobody knows whom to blame, they are tried in one process that runs a single call at a
time: there the culprit is known.
"""

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from refrain.engines.environment.answers import checked_messages, checked_score
from refrain.engines.environment.process import (
    Blame,
    CallFailed,
    EnvironmentProcess,
    EnvironmentSetup,
    ProcessEnded,
)
from refrain.engines.user_code.values import to_json
from refrain.schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentTask,
    TurnText,
)

MAX_PROCESSES = 8
"""Most processes by default. On fewer cores there is one per core."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class EnvironmentFailed(Exception):
    """A conversation without an answer, after all retries."""

    def __init__(self, sample: str, turn: int, reason: str) -> None:
        super().__init__(f"The environment of {sample} failed in turn {turn}: {reason}")
        self.sample = sample
        self.turn = turn
        self.reason = reason


class CannotReplay(EnvironmentFailed):
    """A conversation was lost, and its class has `replays = False`."""


class Diverged(Exception):
    """A replayed turn got another answer than the recorded one."""

    def __init__(self, sample: str, turn: int) -> None:
        super().__init__(
            f"The environment of {sample} answered turn {turn} in another way in a replay. Draw "
            "all random numbers from task.seed, or set `replays = False` in the class."
        )
        self.sample = sample
        self.turn = turn


@dataclass(slots=True)
class _Home:
    """A live conversation in a process."""

    process: EnvironmentProcess
    key: str
    """Name of the conversation there. A replay gets another one."""
    turns: list[TurnText] = field(default_factory=list)
    """Turns that it has answered."""


@dataclass(slots=True)
class _Conversation:
    sample: str
    task: EnvironmentTask
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    turns: list[TurnText] = field(default_factory=list)
    """Turns asked for so far."""
    answers: list[asyncio.Task[EnvironmentAnswer]] = field(default_factory=list)
    """Answers to `turns`, some still to come."""
    ending: asyncio.Task[float | None] | None = None
    home: _Home | None = None
    is_suspect: bool = False
    """Whether it may have ended a process together with others."""


class _Slot:
    """Place of a process, which is replaced when it ends."""

    def __init__(self, create: Callable[[], EnvironmentProcess]) -> None:
        self._create = create
        self._lock = asyncio.Lock()
        self._process: EnvironmentProcess | None = None
        self._is_closed = False
        self.setup: EnvironmentSetup | None = None

    @property
    def load(self) -> int:
        """Calls that run or wait. A slot without a live process comes after idle ones."""
        alive = self._process is not None and self._process.ended is None
        return self._process.num_waiting if self._process and alive else 1

    async def ready(self) -> EnvironmentProcess:
        """Return the live process. Start one if there is none. Raises ValueError."""
        async with self._lock:
            if self._is_closed:
                raise ValueError("refrain has closed the environment's processes")
            if self._process is None or self._process.ended is not None:
                self._process = self._create()
                self.setup = await self._process.start()
            return self._process

    async def close(self) -> None:
        self._is_closed = True
        if self._process is not None:
            await self._process.close()


class EnvironmentPool:
    """Answers turns. Each turn of a sample is executed once, however often it is asked for."""

    def __init__(
        self, config: EnvironmentConfig, surroundings: Mapping[str, str] | None = None
    ) -> None:
        """`surroundings`: the run's locale variables, used instead of this machine's."""
        self._config = config
        num_processes = config.processes or min(MAX_PROCESSES, os.cpu_count() or 1)
        self._slots = [
            _Slot(lambda: EnvironmentProcess(config, surroundings)) for _ in range(num_processes)
        ]
        self._alone = _Slot(lambda: EnvironmentProcess(config, surroundings, at_once=1))
        self._conversations: dict[str, _Conversation] = {}
        self._setup: EnvironmentSetup | None = None
        self._num_placed = 0
        self.num_answered = 0
        """Turns executed so far, for progress."""

    async def start(self) -> EnvironmentSetup:
        """Start the processes. Raises ValueError that names the user's file and the reason."""
        started = [asyncio.create_task(slot.ready()) for slot in self._slots]
        try:
            await asyncio.gather(*started)
        except BaseException:
            await self.close()
            await asyncio.wait(started)
            raise
        self._setup = self._slots[0].setup
        assert self._setup is not None
        return self._setup

    async def answer(
        self,
        sample: str,
        task: EnvironmentTask,
        turns: Sequence[TurnText],
        recorded: Sequence[EnvironmentAnswer],
    ) -> EnvironmentAnswer:
        """Return the answer to the last turn. `recorded`: the answers to the turns before it.

        Raises EnvironmentFailed, its subclass CannotReplay, or Diverged, for the same turn each
        time until `forget`.
        """
        _check_recorded(turns, recorded)
        conversation = self._of(sample, task)
        _keep_common(conversation, turns)
        while len(conversation.answers) < len(turns) - 1:
            # Another pool answered these turns.
            known = recorded[len(conversation.answers)]
            conversation.turns.append(turns[len(conversation.answers)])
            conversation.answers.append(_started(_known(known)))
        if len(conversation.answers) < len(turns):
            answering = self._answer(conversation, list(turns), list(recorded))
            conversation.turns.append(turns[-1])
            conversation.answers.append(_started(answering))
        return await asyncio.shield(conversation.answers[len(turns) - 1])

    async def end(
        self,
        sample: str,
        task: EnvironmentTask,
        turns: Sequence[TurnText],
        recorded: Sequence[EnvironmentAnswer],
        reason: str,
    ) -> float | None:
        """End a conversation that was cut. Return the score of the user's `end`, or None.

        `recorded`: the answers to its turns. The last turn may have none. Raises as `answer` does.
        """
        if not self._defined.has_end:
            return None
        conversation = self._of(sample, task)
        if conversation.ending is None:
            ending = self._end(conversation, list(turns), list(recorded), reason)
            conversation.ending = _started(ending)
        return await asyncio.shield(conversation.ending)

    async def forget(self, samples: Iterable[str]) -> None:
        """Close these conversations and drop their answers. Log those whose `close` fails."""
        known = [self._conversations.pop(one) for one in samples if one in self._conversations]
        await asyncio.gather(*(self._forget(one) for one in known))

    async def close(self) -> None:
        """End all processes. Calls that still run raise EnvironmentFailed."""
        await asyncio.gather(*(slot.close() for slot in (*self._slots, self._alone)))

    @property
    def _defined(self) -> EnvironmentSetup:
        assert self._setup is not None, "start() comes first"
        return self._setup

    def _of(self, sample: str, task: EnvironmentTask) -> _Conversation:
        return self._conversations.setdefault(sample, _Conversation(sample, task))

    async def _answer(
        self,
        conversation: _Conversation,
        turns: list[TurnText],
        recorded: list[EnvironmentAnswer],
    ) -> EnvironmentAnswer:
        async def step() -> EnvironmentAnswer:
            home = await self._home(conversation, turns[:-1], recorded)
            return await self._step(home, turns[-1])

        answer = await self._tried(conversation, len(turns), len(recorded), step)
        self.num_answered += 1
        return answer

    async def _end(
        self,
        conversation: _Conversation,
        turns: list[TurnText],
        recorded: list[EnvironmentAnswer],
        reason: str,
    ) -> float | None:
        async def end() -> float | None:
            home = await self._home(conversation, turns[: len(recorded)], recorded)
            score = await home.process.call("end", home.key, len(home.turns), reason=reason)
            return None if score is None else _checked(home.process, checked_score, score)

        return await self._tried(conversation, len(turns), len(recorded), end)

    async def _tried(
        self,
        conversation: _Conversation,
        turn: int,
        num_before: int,
        once: Callable[[], Awaitable[T]],
    ) -> T:
        """Return what `once` returns. Try it again after failures, at most `retries` times.

        `num_before`: turns that a replay would repeat.
        """
        num_failures = 0
        async with conversation.lock:
            while True:
                try:
                    return await once()
                except CallFailed as error:
                    reason, counts = str(error), True
                    await self._leave(conversation)
                except ProcessEnded as error:
                    reason, counts = str(error), error.blame == Blame.OWN
                    conversation.is_suspect |= error.blame == Blame.UNKNOWN
                    conversation.home = None
                except ValueError as error:
                    # No process can be started, or the task cannot be sent.
                    raise EnvironmentFailed(conversation.sample, turn, str(error)) from error
                num_failures += counts
                if num_failures > self._config.retries:
                    raise EnvironmentFailed(conversation.sample, turn, reason)
                if num_before and not self._defined.replays:
                    raise CannotReplay(conversation.sample, turn, _lost(reason))

    async def _home(
        self,
        conversation: _Conversation,
        turns: list[TurnText],
        recorded: list[EnvironmentAnswer],
    ) -> _Home:
        """Return where the conversation lives, with `turns` answered. Replay it if need be."""
        if not self._defined.has_class:
            return _Home(await self._process_for(conversation), "", turns)
        home = conversation.home
        if home is not None and home.process.ended is None and home.turns == turns:
            return home
        if turns and not self._defined.replays:
            raise CannotReplay(conversation.sample, len(turns) + 1, _lost("it lives elsewhere"))
        await self._leave(conversation)
        home = _Home(await self._process_for(conversation), secrets.token_hex(8))
        conversation.home = home
        task = json.dumps(to_json(asdict(conversation.task)))
        await home.process.call("reset", home.key, task=task)
        for number, (turn, known) in enumerate(zip(turns, recorded, strict=True), 1):
            if await self._step(home, turn) != known:
                await self._leave(conversation)
                raise Diverged(conversation.sample, number)
        return home

    async def _step(self, home: _Home, turn: TurnText) -> EnvironmentAnswer:
        content = asdict(turn)
        answer = await home.process.call("step", home.key, len(home.turns) + 1, **content)
        home.turns.append(turn)
        return _checked(home.process, parsed_answer, answer)

    async def _process_for(self, conversation: _Conversation) -> EnvironmentProcess:
        if conversation.is_suspect:
            return await self._alone.ready()
        self._num_placed += 1
        first = self._num_placed % len(self._slots)
        slots = self._slots[first:] + self._slots[:first]
        return await min(slots, key=lambda slot: slot.load).ready()

    async def _forget(self, conversation: _Conversation) -> None:
        async with conversation.lock:
            await self._leave(conversation)

    async def _leave(self, conversation: _Conversation) -> None:
        """Close the live conversation, if there is one. Log why its `close` fails."""
        home, conversation.home = conversation.home, None
        if home is None or home.process.ended is not None:
            return
        try:
            await home.process.call("close", home.key, len(home.turns))
        except (CallFailed, ProcessEnded) as error:
            logger.warning("close() of the environment of %s: %s", conversation.sample, error)


def parsed_answer(content: Any) -> EnvironmentAnswer:
    """Return the answer that a worker wrote. Raises ValueError if it is none."""
    fields = {"messages", "score", "ended", "num_calls", "num_failed_calls"}
    if not isinstance(content, dict) or content.keys() != fields:
        raise ValueError("an answer without its fields")
    numbers = [content["num_calls"], content["num_failed_calls"]]
    if not all(type(one) is int and one >= 0 for one in numbers):
        raise ValueError("an answer without its counts")
    ended, score = content["ended"] is True, content["score"]
    messages = [] if ended else checked_messages(content["messages"])
    return EnvironmentAnswer(
        tuple(messages), None if score is None else checked_score(score), ended, *numbers
    )


def _checked(process: EnvironmentProcess, check: Callable[[Any], T], content: Any) -> T:
    """Return what `check` returns. End a process that wrote something else."""
    try:
        return check(content)
    except ValueError as error:
        reason = f"its process wrote to refrain's socket: {error}"
        process.end(reason)
        raise ProcessEnded(reason, Blame.OWN) from error


def _check_recorded(turns: Sequence[TurnText], recorded: Sequence[EnvironmentAnswer]) -> None:
    if not turns or len(recorded) != len(turns) - 1:
        raise ValueError(f"{len(turns)} turns need {len(turns) - 1} answers, not {len(recorded)}")


def _keep_common(conversation: _Conversation, turns: Sequence[TurnText]) -> None:
    """Drop the answers from the first turn on that was drawn again with another text."""
    for index, (old, new) in enumerate(zip(conversation.turns, turns, strict=False)):
        if old != new:
            del conversation.turns[index:], conversation.answers[index:]
            conversation.ending = None
            return


def _started(result: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Start a task. Its callers may all be gone before it fails."""
    task = asyncio.create_task(result)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _known(answer: EnvironmentAnswer) -> EnvironmentAnswer:
    return answer


def _lost(reason: str) -> str:
    return f"{reason}. Its class has `replays = False`, so its turns cannot be replayed"
