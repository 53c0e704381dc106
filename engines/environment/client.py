"""An engine's connection to the environments of its run."""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from refrain.engines.actors import RemoteActor
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.rollout import FinishReason, Generated, RequestId, RolloutRequest

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

    async def journal_s(self) -> float:
        """Return the seconds that the store has spent on the journal."""
        return await self._there().call("journal_s", timeout_s=MORE_S)

    async def finished(self, ids: Iterable[RequestId]) -> None:
        """Close the conversations of these samples. Nobody will ask for them again."""
        samples = [str(id.origin) for id in ids]
        await self._there().call("finished", samples, timeout_s=MORE_S)

    async def _call(self, method: str, request: RolloutRequest, *args: Any) -> Any:
        assert request.generated, "no turn has ended"
        given = (request.origin, request.task, request.generated)
        return await self._there().call(method, *given, *args, timeout_s=self._timeout_s)

    def _there(self) -> RemoteActor:
        if self._actor is None:
            import ray

            self._actor = RemoteActor.of("the environments", ray.get_actor(ENVIRONMENT))
        return self._actor


def answered(generated: Generated, answer: TurnAnswer) -> Generated:
    """Return the tokens with the answer to their last turn. An answer that ends the conversation
    adds no tokens."""
    observed = answer.observed
    turn = replace(
        generated.turns[-1],
        num_observed=None if observed is None else len(observed),
        waited_s=answer.waited_s,
        score=answer.score,
        num_calls=answer.num_calls,
        num_failed_calls=answer.num_failed_calls,
    )
    return replace(
        generated,
        token_ids=array("i", [*generated.token_ids, *(observed or ())]),
        turns=(*generated.turns[:-1], turn),
        score=answer.score if observed is None else None,
    )


def without_last_answer(generated: Generated) -> Generated:
    """Return the tokens without those that were observed last, which no turn will follow."""
    last = generated.turns[-1]
    token_ids = generated.token_ids[: len(generated.token_ids) - (last.num_observed or 0)]
    turns = (*generated.turns[:-1], replace(last, num_observed=None))
    return replace(generated, token_ids=token_ids, turns=turns)
