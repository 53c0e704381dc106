"""An engine's connection to the environments of its run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engines.actors import RemoteActor
from schemas.rollout import FinishReason, RolloutRequest

ENVIRONMENT = "environment"
"""Name of a run's environment actor."""
MORE_S = 60.0
"""Seconds that a call may take besides the environment's own: a worker that starts, and tokens."""


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """An environment's answer to a turn."""

    observed: Sequence[int] | None
    """Tokens to append, up to the next generation prompt. None: the conversation has ended."""
    score: float | None = None
    """Score of the turn; of the conversation, if it has ended. None: it gave none."""
    num_calls: int = 0
    num_failed_calls: int = 0
    waited_s: float = 0.0
    """Seconds from the question to the answer."""
    failed: bool = False
    """Whether the environment failed, so the conversation is over."""
    restarts: bool = False
    """Whether the conversation begins anew: its environment was lost, and gives other answers."""


class Environments(Protocol):
    """The environments of a run, as an engine sees them."""

    async def answer(self, request: RolloutRequest) -> TurnAnswer:
        """Answer the last turn of `request.generated`. Bounded in time."""
        ...

    async def end(self, request: RolloutRequest, reason: FinishReason) -> float | None:
        """End a conversation that was cut. Return the environment's score, or None."""
        ...


class EnvironmentClient:
    """The environments of a run, in an actor that another process has started. Every call has a
    time limit."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the longest that the environment may take for one answer, retries
        included."""
        self._timeout_s = timeout_s + MORE_S
        self._actor: RemoteActor | None = None

    async def answer(self, request: RolloutRequest) -> TurnAnswer:
        return await self._call("answer", request)

    async def end(self, request: RolloutRequest, reason: FinishReason) -> float | None:
        return await self._call("end", request, str(reason))

    async def _call(self, method: str, request: RolloutRequest, *args: Any) -> Any:
        import ray

        if self._actor is None:
            handle = ray.get_actor(ENVIRONMENT)
            self._actor = RemoteActor.of("the environments", handle)
        generated = request.generated
        assert generated, "no turn has ended"
        given = (str(request.origin), request.task, list(generated.token_ids), generated.turns)
        return await self._actor.call(method, *given, *args, timeout_s=self._timeout_s)
