"""An engine's connection to the environments of its run.

    engine ─┐                           ┌─► actor on node 0: a half of the samples
            ├─ share_of(sample, 2) ─────┤
    engine ─┘                           └─► actor on node 1: the others

Each node of a run has an actor, and each sample belongs to one of them for the whole run. So a
conversation that moves, or a race of it on two nodes, asks one actor: each turn is executed once.
If the node of an actor dies, Ray restarts the actor on another node, and it keeps its samples.
"""

import asyncio
import re
import time
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from refrain.engines.actors import ActorGone, RemoteActor
from refrain.engines.bounded import gather_all
from refrain.schemas.environment import EnvironmentConfig
from refrain.schemas.rollout import FinishReason, Generated, RequestId, RolloutRequest

RESTART_S = 180.0
"""Seconds that a call may take besides the environment's own. If a node dies, Ray has to notice it,
and the actor restarts on another one. Measured on a busy machine: 38 s."""
AGAIN_S = 1.0
"""Seconds between two calls to an actor whose node may be dead."""
WRITTEN_S = 10.0
"""Longest time in seconds to wait for the journal after an engine's death."""
_NAME = re.compile(r"environment-\d+-of-(\d+)")


def name_of(share: int, num_shares: int) -> str:
    """Return the Ray name of an actor. `share`: from 0 on."""
    return f"environment-{share}-of-{num_shares}"


def share_of(sample: str, num_shares: int) -> int:
    """Return which of the actors has a sample. `sample`: `str` of its `RolloutRequest.origin`."""
    return zlib.crc32(sample.encode()) % num_shares


def names() -> list[str]:
    """Return the names of the run's actors, by share. Raise ValueError if none is alive."""
    from ray.util import list_named_actors

    found = [match for name in list_named_actors() if (match := _NAME.fullmatch(name))]
    if not found:
        raise ValueError("the run has no actor that answers turns: start_environments comes first")
    num_shares = int(found[0][1])
    return [name_of(share, num_shares) for share in range(num_shares)]


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
    """The environments of a run, in actors that the driver has started. Every call has a time
    limit."""

    def __init__(self, config: EnvironmentConfig) -> None:
        # A lost conversation is reset, and all its turns are replayed.
        most_calls = (config.retries + 1) * (config.max_turns + 1)
        self._timeout_s = most_calls * config.timeout_s + RESTART_S
        self._actors: list[RemoteActor] = []
        """By share."""

    async def answer(self, request: RolloutRequest) -> TurnAnswer:
        return await self._call("answer", request)

    async def end(self, request: RolloutRequest, reason: FinishReason) -> TurnAnswer:
        return await self._call("end", request, str(reason))

    async def failures(self) -> dict[str, str]:
        """Return why conversations failed since the last call, by sample."""
        found = await self._call_all("failures")
        return {sample: reason for own in found for sample, reason in own.items()}

    async def journal_s(self) -> float:
        """Return the seconds that the store has spent on the journal."""
        return sum(await self._call_all("journal_s"))

    async def finished(self, ids: Iterable[RequestId]) -> None:
        """Close the conversations of these samples. Nobody will ask for them again."""
        await self._call_shares("finished", ids, RESTART_S)

    async def written(self, ids: Iterable[RequestId]) -> set[str]:
        """Wait until the store has all answered turns of these samples. Return the samples that
        have some. Raise `ActorError` if an actor takes longer than `WRITTEN_S`."""
        return {one for own in await self._call_shares("written", ids, WRITTEN_S) for one in own}

    async def _call(self, method: str, request: RolloutRequest, *args: Any) -> Any:
        assert request.generated, "no turn has ended"
        actors = self._there()
        actor = actors[share_of(str(request.origin), len(actors))]
        given = (request.origin, request.task, request.generated)
        return await _answer_of(actor, method, *given, *args, timeout_s=self._timeout_s)

    async def _call_all(self, method: str) -> list[Any]:
        calls = (_answer_of(actor, method, timeout_s=RESTART_S) for actor in self._there())
        return await gather_all(calls)

    async def _call_shares(
        self, method: str, ids: Iterable[RequestId], timeout_s: float
    ) -> list[Any]:
        """Call each actor that has some of these samples, with their names."""
        actors, samples = self._there(), defaultdict[int, list[str]](list)
        for sample in (str(id.origin) for id in ids):
            samples[share_of(sample, len(actors))].append(sample)
        asked = ((actors[share], own) for share, own in samples.items())
        calls = (_answer_of(actor, method, own, timeout_s=timeout_s) for actor, own in asked)
        return await gather_all(calls)

    def _there(self) -> list[RemoteActor]:
        if not self._actors:
            import ray

            self._actors = [
                RemoteActor.of("the environments", ray.get_actor(name)) for name in names()
            ]
        return self._actors


async def _answer_of(actor: RemoteActor, method: str, *args: Any, timeout_s: float) -> Any:
    """Return the actor's answer. Raise `ActorError` after `timeout_s` seconds in all.

    Between the death of a node and the moment at which Ray notices it, each call fails at once. Ray
    restarts the actor after that.
    """
    from ray.exceptions import ActorUnavailableError

    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await actor.call(method, *args, timeout_s=deadline - time.monotonic())
        except ActorGone as error:
            restarts = isinstance(error.__cause__, ActorUnavailableError)
            if not restarts or time.monotonic() + AGAIN_S > deadline:
                raise
        await asyncio.sleep(AGAIN_S)


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
