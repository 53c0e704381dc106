"""An engine's connection to the environments of its run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engines.actors import RemoteActor
from schemas.environment import EnvironmentConfig
from schemas.rollout import FinishReason, RequestId, RolloutRequest

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

    async def end(self, request: RolloutRequest, reason: FinishReason) -> TurnAnswer:
        """End a conversation that was cut. Return its score, and whether the environment failed."""
        ...


class EnvironmentClient:
    """The environments of a run, in an actor that the driver has started. Every call has a time
    limit."""

    def __init__(self, config: EnvironmentConfig) -> None:
        # A lost conversation is reset, and all its turns are replayed.
        most_calls = (config.retries + 1) * (config.max_turns + 1)
        self._timeout_s = most_calls * config.timeout_s + MORE_S
        self._actor: RemoteActor | None = None

    async def answer(self, request: RolloutRequest) -> TurnAnswer:
        return await self._call("answer", request)

    async def end(self, request: RolloutRequest, reason: FinishReason) -> TurnAnswer:
        return await self._call("end", request, str(reason))

    async def failures(self) -> dict[str, str]:
        """Return why conversations failed since the last call, by sample."""
        return await self._there().call("failures", timeout_s=MORE_S)

    async def finished(self, ids: Iterable[RequestId]) -> None:
        """Close the conversations of these samples. Nobody will ask for them again."""
        samples = [str(id.origin) for id in ids]
        await self._there().call("finished", samples, timeout_s=MORE_S)

    async def _call(self, method: str, request: RolloutRequest, *args: Any) -> Any:
        generated = request.generated
        assert generated, "no turn has ended"
        given = (str(request.id.origin), request.task, list(generated.token_ids), generated.turns)
        return await self._there().call(method, *given, *args, timeout_s=self._timeout_s)

    def _there(self) -> RemoteActor:
        if self._actor is None:
            import ray

            self._actor = RemoteActor.of("the environments", ray.get_actor(ENVIRONMENT))
        return self._actor
