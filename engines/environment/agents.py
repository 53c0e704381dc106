"""Agents of a worker process: the user's `run(task, model)`, and the calls that it makes.

    reset  ─► run starts ─► model.chat(prompt)             waits
    turn 1 ─► its answer ─► model.chat(.., turn 1, tool)   the tool's message is observed; waits
    turn 2 ─► its answer ─► run returns                    its score ends the conversation

Workers import this module: see `engines/user_code/importing.py`.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ..user_code.importing import UserFault
from .answers import Answer, ending_score
from .completions import (
    MODEL,
    Fields,
    added_messages,
    assistant_message,
    check_request,
    completion,
    plain_messages,
)
from .conversations import InThread, Message, UserCode, awaited, called, end_child
from .endpoint import Endpoint


class AgentConversation:
    """One conversation of an agent. It has the methods of `LiveConversation`."""

    def __init__(self, code: UserCode, in_thread: InThread, endpoint: Endpoint) -> None:
        self._code = code
        self._in_thread = in_thread
        self._endpoint = endpoint
        self._object: Any = None
        self._line: TurnLine | None = None
        self._key = ""
        self._agent: asyncio.Future[Any] | None = None
        """The user's coroutine, once it has started."""
        self._has_failed = False
        """Whether its failure has been reported."""

    async def reset(self, task: Mapping[str, Any]) -> None:
        """Start the agent, and wait for its first call or its end."""
        run = self._code.kind
        if inspect.isclass(run):
            self._object = await self._in_thread(run, **self._code.kwargs)
            run = self._object.run
        self._line = TurnLine(task["messages"], self._code.schemas)
        self._key = self._endpoint.add(self._line.ask)
        model = AgentModel(self._line, self._endpoint.base_url, self._key, self._code.schemas)
        self._agent = asyncio.ensure_future(awaited(run(SimpleNamespace(**task), model)))
        await self._next()

    async def step(self, text: str, calls: list[dict[str, Any]], problem: str | None) -> Answer:
        """Give a turn to the call that waits for it. Return the messages of the next call, or the
        score if the agent has ended."""
        assert self._line is not None, "reset() comes first"
        assert self._agent is not None, "reset() comes first"
        if not self._agent.done():
            self._line.give(text, calls, problem)
        messages = await self._next()
        answer = {"messages": messages or [], "score": None, "ended": messages is None}
        if messages is None:
            answer["score"] = ending_score(self._agent.result(), "run()")
        num_calls = sum(one["role"] == "tool" for one in answer["messages"])
        return {**answer, "num_calls": num_calls, "num_failed_calls": 0}

    async def end(self, reason: str) -> Any:
        """Stop an agent whose conversation was cut. Return what the user's `end` returns."""
        await self._stop(f"it was cut ({reason})")
        return await self._call("end", reason)

    async def close(self) -> None:
        """Stop the agent, and let the user's object free what it holds."""
        try:
            await self._stop("it was closed")
        finally:
            await self._call("close")

    async def _next(self) -> list[Message] | None:
        """Return the messages of the next call, or None if the agent has ended. Raise its error."""
        assert self._line is not None
        assert self._agent is not None
        try:
            messages = await self._line.next_call(self._agent)
        except asyncio.CancelledError:
            await self._stop("it took too long")
            raise
        except UserFault:
            self._has_failed = True
            raise
        if messages is None:
            self._raise_failure()
        return messages

    async def _stop(self, reason: str) -> None:
        """Cancel the agent and wait for its end. Raise what its clean-up raises."""
        self._endpoint.remove(self._key)
        if self._line is None or self._agent is None:
            return
        self._line.close(reason)
        self._agent.cancel()
        await asyncio.wait({self._agent})
        if not self._agent.cancelled():
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise the error with which the agent has ended, once."""
        assert self._agent is not None
        if self._agent.cancelled():
            raise UserFault("run() cancelled itself")
        error = self._agent.exception()
        if error is not None and not self._has_failed:
            self._has_failed = True
            raise error

    async def _call(self, method: str, *arguments: Any) -> Any:
        function = getattr(self._object, method, None)
        return None if function is None else await called(self._in_thread, function, *arguments)


class AgentModel:
    """The policy, as the user's `run` gets it."""

    name = MODEL

    def __init__(
        self, line: TurnLine, base_url: str, api_key: str, tools: Sequence[dict[str, Any]]
    ) -> None:
        self._line = line
        self.base_url = base_url
        """Address for OpenAI's client and others that speak HTTP."""
        self.api_key = api_key
        """Key for that address. It names the conversation."""
        self.tools = copy.deepcopy(list(tools))
        """JSON schemas of the declared tools. The prompt shows them."""

    async def chat(self, messages: Any, tools: Any = None, **settings: Any) -> dict[str, Any]:
        """Return the policy's next turn, in the shape of OpenAI's chat completions."""
        return await self._line.ask({**settings, "messages": messages, "tools": tools})


class _Call:
    """A call of the agent."""

    def __init__(self, messages: list[Fields], added: list[Message]) -> None:
        self.messages = messages
        """All its messages."""
        self.added = added
        """Those that it adds to the conversation."""
        self.answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.num_waiting = 0
        self.is_answered = False
        """Whether somebody got the answer."""

    @property
    def is_abandoned(self) -> bool:
        """Whether who waited has given up, such as a client with a time limit. It may ask again."""
        return not self.num_waiting and not self.is_answered


class TurnLine:
    """Calls of an agent, each answered by the next turn of the policy."""

    def __init__(self, prompt: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> None:
        self._history = plain_messages(prompt)
        self._tools = tools
        self._loop = asyncio.get_running_loop()
        self._last: _Call | None = None
        self._called = asyncio.Event()
        """Whether the agent has made a call that `next_call` has not returned."""
        self._num_calls = self._num_turns = 0
        self._fault: UserFault | None = None
        self._closed: str | None = None

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the turn that answers a request's messages. Raises UserFault for a request that
        cannot be answered. Then the conversation has failed, even if the agent catches the error.
        """
        end_child()
        if asyncio.get_running_loop() is not self._loop:
            raise UserFault("model.chat was called in another event loop: use model.base_url there")
        # An agent that calls in a loop, whatever happens, must not keep the process busy.
        await asyncio.sleep(0)
        if self._closed is not None:
            raise UserFault(f"the conversation is over: {self._closed}")
        try:
            check_request(request, self._tools)
            call = self._accepted(plain_messages(request.get("messages")))
        except UserFault as fault:
            self._fault = self._fault or fault
            self._called.set()
            raise
        return await self._answer_to(call)

    def give(self, text: str, calls: list[dict[str, Any]], problem: str | None) -> None:
        """Answer the call that waits with a turn."""
        assert self._last is not None, "the agent has made no call"
        self._num_turns += 1
        message = assistant_message(text, calls, self._num_turns)
        self._history += plain_messages([message])
        self._last.answer.set_result(completion(message, problem, self._num_turns))

    async def next_call(self, agent: asyncio.Future[Any]) -> list[Message] | None:
        """Wait for the next call, and return the messages that it adds. None: the agent has ended.
        Raises UserFault for a call that cannot be answered."""
        calling = asyncio.ensure_future(self._called.wait())
        try:
            await asyncio.wait({calling, agent}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            calling.cancel()
        if self._fault is not None:
            raise self._fault
        if agent.done():
            return None
        self._called.clear()
        assert self._last is not None
        return self._last.added

    def close(self, reason: str) -> None:
        """Answer no more calls."""
        self._closed = self._closed or reason
        if self._last is not None:
            self._last.answer.cancel()

    def _accepted(self, messages: list[Fields]) -> _Call:
        """Return the call that asks for these messages. Raises UserFault."""
        last = self._last
        if last is not None and last.is_abandoned and messages == last.messages:
            return last
        if last is not None and not last.answer.done():
            raise UserFault(
                f"call {self._num_calls + 1} came while call {self._num_calls} waited for its "
                "turn: a conversation is one line of turns, so await each call before the next"
            )
        added = added_messages(self._history, messages, self._num_calls + 1)
        self._num_calls += 1
        self._history += plain_messages(added)
        self._last = _Call(messages, added)
        self._called.set()
        return self._last

    async def _answer_to(self, call: _Call) -> dict[str, Any]:
        call.num_waiting += 1
        try:
            answer = await asyncio.shield(call.answer)
        finally:
            call.num_waiting -= 1
        call.is_answered = True
        return copy.deepcopy(answer)
