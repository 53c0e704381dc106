"""Conversations of a worker process: the user's object, its tools and what was written so far.

Workers import this module: see `engines/user_code/importing.py`.
"""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..user_code.importing import UserFault, as_text, import_file, message_of
from .answers import MAX_NAME, Answer, answer_of
from .loading import MISSING, found_environment, is_agent
from .tools import (
    Tool,
    call_problem,
    declared_schemas,
    declared_tools,
    failure_of,
    observation_of,
)

Message = dict[str, str]
InThread = Callable[..., Coroutine[Any, Any, Any]]
"""Function that runs a plain function with its arguments in a thread."""


class UserCode(NamedTuple):
    """The user's class and tools."""

    kind: Any
    """Class of the environment, or the function `run` of an agent. None: tools alone."""
    kwargs: dict[str, Any]
    tools: dict[str, Tool]
    """Tools that refrain executes. Empty for an agent, which executes its own."""
    schemas: list[dict[str, Any]]
    """JSON schemas of the tools, which the prompt shows."""

    @property
    def is_agent(self) -> bool:
        return is_agent(self.kind)

    @property
    def has_step(self) -> bool:
        return hasattr(self.kind, "step")

    @property
    def setup(self) -> dict[str, Any]:
        """Fields of an `EnvironmentSetup`."""
        return {
            "tools": self.schemas,
            "has_class": self.kind is not None,
            "has_end": hasattr(self.kind, "end"),
            "replays": bool(getattr(self.kind, "replays", True)),
        }


def load_user_code(path: Path, name: str | None, kwargs: dict[str, Any]) -> UserCode:
    """Import the user's file. Raises UserFault that names the fault."""
    module = import_file(path, "environment.path", MISSING)
    found = found_environment(module, path, name)
    is_class = inspect.isclass(found)
    if is_class:
        _check_arguments(found, kwargs, path)
    elif kwargs:
        kind = "a function" if is_agent(found) else "tools alone"
        raise UserFault(f"environment.kwargs are for a class, but {path} has {kind}")
    if is_agent(found):
        return _agent_of(found, kwargs, getattr(found if is_class else module, "tools", []), path)
    functions = getattr(found, "tools", []) if is_class else found
    _check_list(functions, path)
    if not functions and not hasattr(found, "step"):
        raise UserFault(f"the list of tools in {path} is empty: add a function, or write a class")
    tools = declared_tools(functions, found if is_class else None)
    schemas = [tool.schema for tool in tools.values()]
    return UserCode(found if is_class else None, kwargs, tools, schemas)


def _agent_of(found: Any, kwargs: dict[str, Any], tools: Sequence[Any], path: Path) -> UserCode:
    """Return an agent, which may declare its tools as JSON schemas."""
    run = getattr(found, "run", found)
    if not inspect.iscoroutinefunction(run):
        raise UserFault(f"run() in {path} is a plain function: write `async def run`")
    _check_list(tools, path)
    schemas = declared_schemas(tools, found if inspect.isclass(found) else None)
    return UserCode(found, kwargs, {}, schemas)


def _check_list(tools: Any, path: Path) -> None:
    if not isinstance(tools, (list, tuple)):
        raise UserFault(f"`tools` in {path} is a {type(tools).__name__}: write a list")


class LiveConversation:
    """One conversation, with the user's object if there is a class."""

    def __init__(self, code: UserCode, in_thread: InThread) -> None:
        self._code = code
        self._in_thread = in_thread
        self._object: Any = None
        self._messages: list[Message] = []

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Create the user's object and start its conversation."""
        if self._code.kind is None:
            return
        self._object = await self._in_thread(self._code.kind, **self._code.kwargs)
        await self._call("reset", SimpleNamespace(**task))

    async def step(self, text: str, calls: list[dict[str, Any]], problem: str | None) -> Answer:
        """Answer a turn of the policy."""
        self._messages.append({"role": "assistant", "content": text})
        loop = asyncio.get_running_loop()
        runner = ToolRunner(self._code.tools, self._object, loop, self._in_thread)
        turn = PolicyTurn(text, calls, problem, list(self._messages), runner)
        if self._code.has_step:
            answer = answer_of(await self._call("step", turn))
        elif calls or problem:
            messages = await turn.run_async()
            answer = answer_of(messages)
        else:
            answer = answer_of(None)
        self._messages += answer["messages"]
        return {**answer, "num_calls": runner.num_calls, "num_failed_calls": runner.num_failed}

    async def end(self, reason: str) -> Any:
        """Return what the user's `end` returns for a conversation that was cut."""
        return await self._call("end", reason)

    async def close(self) -> None:
        """Let the user's object free what it holds."""
        await self._call("close")

    async def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._object, method, None)
        return None if function is None else await called(self._in_thread, function, *arguments)


class PolicyTurn:
    """A turn of the policy, as the user's `step` gets it."""

    def __init__(
        self,
        text: str,
        calls: list[dict[str, Any]],
        problem: str | None,
        messages: list[Message],
        runner: ToolRunner,
    ) -> None:
        self.text = text
        self.calls = tuple(SimpleNamespace(**call) for call in calls)
        """Tool calls, each with `name` and `arguments`."""
        self.problem = problem
        """Why the tool calls cannot be parsed, or None."""
        self.messages = messages
        """All messages after the prompt, this turn the last."""
        self._runner = runner

    def run(self) -> list[Message]:
        """Execute the calls of declared tools. Return one message for each, in order."""
        if self.problem is not None:
            return [self._runner.refused(self.problem)]
        return [self._runner.run(call.name, call.arguments) for call in self.calls]

    async def run_async(self) -> list[Message]:
        """Execute the calls as `run` does. Use it in an async `step`."""
        if self.problem is not None:
            return [self._runner.refused(self.problem)]
        return [await self._runner.run_async(call.name, call.arguments) for call in self.calls]


class ToolRunner:
    """Executes tool calls and counts them."""

    def __init__(
        self,
        tools: dict[str, Tool],
        owner: Any,
        loop: asyncio.AbstractEventLoop,
        in_thread: InThread,
    ) -> None:
        self._tools = tools
        self._owner = owner
        self._loop = loop
        self._in_thread = in_thread
        self.num_calls = 0
        self.num_failed = 0

    def run(self, name: str, arguments: Any) -> Message:
        """Execute one call in this thread. Return its message."""
        if problem := self._problem(name, arguments):
            return self.refused(problem, name)
        function = self._bound(self._tools[name])
        if inspect.iscoroutinefunction(function):
            _refuse_on_loop()
        try:
            result = function(**arguments)
            if inspect.isawaitable(result):
                # The loop runs in another thread.
                result = asyncio.run_coroutine_threadsafe(awaited(result), self._loop).result()
        except (Exception, SystemExit) as error:
            return self.refused(failure_of(error), name)
        return self._done(name, result)

    async def run_async(self, name: str, arguments: Any) -> Message:
        """Execute one call, a plain function in a thread. Return its message."""
        if problem := self._problem(name, arguments):
            return self.refused(problem, name)
        try:
            result = await called(self._in_thread, self._bound(self._tools[name]), **arguments)
        except Exception as error:
            return self.refused(failure_of(error), name)
        return self._done(name, result)

    def refused(self, reason: str, name: str | None = None) -> Message:
        """Count a failed call. Return its message."""
        self.num_failed += 1
        return self._done(name, as_text(reason))

    def _done(self, name: str | None, result: Any) -> Message:
        self.num_calls += 1
        named = {} if name is None else {"name": as_text(name)[:MAX_NAME]}
        return {"role": "tool", **named, "content": observation_of(result)}

    def _problem(self, name: str, arguments: Any) -> str | None:
        if name not in self._tools:
            names = ", ".join(self._tools) or "there are none"
            return f"There is no tool {name!r:.80}. The tools: {names}."
        return call_problem(self._tools[name], arguments)

    def _bound(self, tool: Tool) -> Callable[..., Any]:
        return getattr(self._owner, tool.name) if tool.is_method else tool.function


async def called(in_thread: InThread, function: Any, /, *arguments: Any, **named: Any) -> Any:
    """Call a function of the user: an async one on the loop, a plain one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await awaited(function(*arguments, **named))
    result = await in_thread(function, *arguments, **named)
    return await awaited(result) if inspect.isawaitable(result) else result


async def awaited(result: Any) -> Any:
    """Wait for code of the user. An exit becomes a UserFault, because it would end the loop."""
    try:
        return await result
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserFault(message_of(error)) from error
    finally:
        end_child()


def run_plainly(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a plain function of the user in a thread, with exits as in `awaited`."""
    try:
        return function(*arguments, **named)
    except (SystemExit, KeyboardInterrupt) as error:
        raise UserFault(message_of(error)) from error
    finally:
        end_child()


WORKER_PID = os.getpid()


def end_child() -> None:
    """End the process if the user's code forked it: both processes return from that code."""
    if os.getpid() != WORKER_PID:
        os._exit(0)


def _refuse_on_loop() -> None:
    """Raise UserFault in a coroutine, which must not block the loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UserFault("an async step must call `await turn.run_async()`, not `turn.run()`")


def _check_arguments(kind: Any, kwargs: dict[str, Any], path: Path) -> None:
    try:
        inspect.signature(kind).bind(**kwargs)
    except TypeError as error:
        names = ", ".join(kwargs) or "no arguments"
        raise UserFault(
            f"{kind.__name__} in {path} cannot be created with {names}: {error}. Correct "
            "environment.kwargs"
        ) from None
