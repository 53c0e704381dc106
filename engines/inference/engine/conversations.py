"""Conversations of an engine: what happens when a turn ends.

    turn ends ─► environment answers ─► its tokens are appended ─► the next turn is submitted
                        └─ it ended the conversation, or a limit did ─► the response is finished

A conversation is one response of one request. Between two turns it waits here, and vLLM does not
know it; vLLM's prefix cache keeps its keys and values as long as there is room. A request that
waits may be withdrawn or copied. Its last turn then has no answer, and the next engine asks again:
the environment gives the same answer to the same turn (`engines.environment.pool`).
"""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from refrain.engines.environment.client import Environments, answered, without_last_answer
from refrain.schemas.rollout import FinishReason, Generated, RequestId, RolloutRequest, Turn


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """Limits of a conversation, besides `RolloutRequest.max_response_tokens`."""

    max_turns: int
    max_turn_tokens: int | None = None
    max_wait_s: float | None = None
    """Longest time in seconds that a conversation waits for its environment, all turns together."""

    def max_tokens(self, request: RolloutRequest) -> int:
        """Return how many tokens the request's current turn may still sample."""
        generated = request.generated or NOTHING
        left = request.max_response_tokens - len(generated.token_ids)
        if self.max_turn_tokens is None:
            return left
        return min(left, self.max_turn_tokens - num_in_turn(generated))

    def reason_to_end(self, generated: Generated, max_tokens: int) -> FinishReason | None:
        """Return why a conversation has no room for another turn, or None if it has.

        `max_tokens`: bound of all tokens after the prompt. The next turn needs one at least.
        """
        if len(generated.turns) >= self.max_turns:
            return FinishReason.TURNS
        waited_s = sum(turn.waited_s for turn in generated.turns)
        if self.max_wait_s is not None and waited_s > self.max_wait_s:
            return FinishReason.TIME
        return FinishReason.CONTEXT if len(generated.token_ids) >= max_tokens else None


NOTHING = Generated(array("i"), array("f"), ())
"""A response without a token."""


class Conversations:
    """Requests of an engine that wait for their environment."""

    def __init__(
        self,
        environments: Environments,
        limits: TurnLimits,
        go_on: Callable[[RolloutRequest], Awaitable[None]],
        finish: Callable[[RolloutRequest, FinishReason], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """`go_on`: submit the next turn. `finish`: report a finished response. `fail`: report an
        error that ends the engine."""
        self._environments = environments
        self.limits = limits
        self._go_on, self._finish, self._fail = go_on, finish, fail
        self._waiting: dict[RequestId, tuple[RolloutRequest, asyncio.Task[None]]] = {}
        """Requests whose last turn has no answer yet."""
        self._ending: dict[RequestId, asyncio.Task[None]] = {}
        """Requests that a limit has cut, which wait for their score."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their environment."""
        return len(self._waiting) + len(self._ending)

    def waiting(self, id: RequestId) -> RolloutRequest | None:
        """Return a request that waits for an answer, with its tokens so far, or None."""
        own = self._waiting.get(id)
        return own and own[0]

    def withdraw(self, id: RequestId) -> RolloutRequest | None:
        """Remove a request that waits for an answer and return it, or None."""
        own = self._waiting.pop(id, None)
        if own is None:
            return None
        own[1].cancel()
        return own[0]

    async def ended(self, ids: Iterable[RequestId]) -> None:
        """Wait until those of these requests have finished that a limit has cut. Another engine
        could not know that their last turn must not be answered."""
        if tasks := [self._ending[id] for id in ids if id in self._ending]:
            await asyncio.wait(tasks)

    def ask(self, request: RolloutRequest) -> None:
        """Ask for the answer to the last turn of `request.generated`, then continue."""
        self._waiting[request.id] = (request, self._started(self._answer(request)))

    def turn_ended(self, request: RolloutRequest, reason: FinishReason) -> RolloutRequest:
        """Continue after a turn that vLLM has finished; `request.generated` has its tokens. Return
        the request as it waits.

        A turn that a limit has cut is neither parsed nor executed.
        """
        assert request.generated
        request = replace(request, generated=with_turn(request.generated), kv=None)
        if reason is FinishReason.STOP:
            self.ask(request)
        else:
            self._cut(request, reason)
        return request

    def _started(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._report)
        return task

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self._fail(error)

    async def _answer(self, request: RolloutRequest) -> None:
        answer = await self._environments.answer(request)
        assert request.generated
        del self._waiting[request.id]
        generated = answered(request.generated, answer)
        request = replace(request, generated=generated)
        if answer.restarts:
            await self._go_on(replace(request, generated=None))
        elif answer.observed is None:
            self._finish(request, FinishReason.FAILED if answer.failed else FinishReason.STOP)
        elif reason := self.limits.reason_to_end(generated, request.max_response_tokens):
            self._cut(replace(request, generated=without_last_answer(generated)), reason)
        else:
            await self._go_on(request)

    def _cut(self, request: RolloutRequest, reason: FinishReason) -> None:
        """End a conversation that a limit has cut."""
        self._ending[request.id] = self._started(self._end(request, reason))

    async def _end(self, request: RolloutRequest, reason: FinishReason) -> None:
        answer = await self._environments.end(request, reason)
        assert request.generated
        del self._ending[request.id]
        scored = replace(request.generated, score=answer.score)
        reason = FinishReason.FAILED if answer.failed else reason
        self._finish(replace(request, generated=scored), reason)


def waits(generated: Generated | None) -> bool:
    """Return whether the tokens of an unfinished request end with a turn without an answer."""
    return bool(generated and generated.turns and generated.turns[-1].num_observed is None)


def num_in_turn(generated: Generated) -> int:
    """Return how many tokens the turn has that is being sampled."""
    return len(generated.token_ids) - sum(turn.num_tokens for turn in generated.turns)


def with_turn(generated: Generated) -> Generated:
    """Return the tokens with the sampled turn as ended, without an answer."""
    earlier = generated.turns
    turn = Turn(
        num_sampled=num_in_turn(generated),
        ended_s=time.time(),
        num_draft_tokens=generated.num_draft_tokens - sum(t.num_draft_tokens for t in earlier),
        num_accepted_tokens=generated.num_accepted_tokens
        - sum(t.num_accepted_tokens for t in earlier),
    )
    return replace(generated, turns=(*generated.turns, turn))
