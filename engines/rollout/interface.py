"""Interface of a rollout engine, real or in virtual time, to the coordinator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from schemas.counts import DraftingCounts, KVCounts
from schemas.rollout import (
    DraftProgress,
    DraftSetting,
    FinishedRollout,
    RequestId,
    Rollout,
    RolloutRequest,
    SavedKV,
)
from schemas.weights import PolicyWeights


class EngineDied(RuntimeError):
    """An engine is gone or does not answer. Its requests can be submitted elsewhere."""

    def __init__(self, engine: int, cause: str, root: str = "") -> None:
        """`root`: error that it died of, in its own words; "" when it was killed, or is silent."""
        super().__init__(f"rollout engine {engine} died: {cause}")
        self.engine = engine
        self.root = root


class EngineFails(EngineDied):
    """An engine has died of the same error again, without a rollout in between: it will do so
    always."""


class EngineGone(EngineDied):
    """An engine is dead, and the cluster has no place for it any more."""


class WeightSyncError(RuntimeError):
    """An engine does not compute what the trainer computes. Generation must not start."""


class WeightsLost(WeightSyncError):
    """The weights are not there any more: their trainer has died, or has made later ones."""


Finished = Rollout | FinishedRollout
"""A finished rollout. Engines in virtual time tell all of it, others where its tokens are: only who
stores them looks."""


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Events of one engine since it was last asked."""

    finished: tuple[Finished, ...] = ()
    progress: Mapping[RequestId, int] = field(default_factory=dict)
    """Response tokens so far of every unfinished request."""
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    """State of drafting of the unfinished requests that are drafted for; may be some moments old,
    or lack those that just came."""


class Engine(Protocol):
    """A place where requests are generated.

    Every method raises `EngineDied` when the engine is gone; none waits without bound.
    """

    index: int
    tp_degree: int

    @property
    def node_id(self) -> str | None:
        """Node whose memory it shares with other engines; None: with none that is known."""
        ...

    async def start(self) -> None:
        """Bring the engine up, or up again after its death, without requests or weights. Raises
        `EngineGone` when there is no place for it, and none to wait for."""
        ...

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Take requests; those with `generated` tokens go on where they were left."""
        ...

    async def withdraw(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Give requests back with what was generated. One that has finished meanwhile is left
        out: it comes as an event. `keep_kv`: with their keys and values, where that is possible;
        they are kept until the next weights come."""
        ...

    async def precopy(self, ids: Sequence[RequestId]) -> SavedKV | None:
        """Save what there is of these requests' keys and values while they go on, so that
        `withdraw` has less to save; for engines of the node that they may go to. Returns once it
        is there; None: nothing is."""
        ...

    async def expect_kv(self, saved: Sequence[SavedKV]) -> None:
        """Make ready what was saved ahead, while others have the GPUs; of requests that may come,
        or not."""
        ...

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Requests with what was generated so far; they go on here. One that has finished
        meanwhile is left out. `keep_kv`: likewise, of those that are long enough for it to
        pay; they are kept for a minute."""
        ...

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        """Draft so for these requests from now on; those that are not here are passed over."""
        ...

    async def load_weights(self, weights: PolicyWeights) -> float:
        """Take a policy version; the engine must be empty.

        Returns the largest mean |trainer - engine| log-probability over the canaries.
        Raises `WeightSyncError` when it exceeds the tolerance.
        """
        ...

    async def park(self) -> None:
        """Leave the GPUs to engines of another layout. The engine must be empty, and stays so until
        `wake`; it takes weights meanwhile if it keeps them while it is parked."""
        ...

    async def sleep(self) -> None:
        """Leave the GPUs to the trainer, from work or parked, without weights. The engine must be
        empty, and stays so until `wake` and `load_weights`; one that was parked stays so."""
        ...

    async def wake(self) -> bool:
        """Take the GPUs again. False when the weights are gone and must be loaded."""
        ...

    async def take_drafting_counts(self) -> DraftingCounts:
        """Counts since the last call."""
        ...

    async def take_kv_counts(self) -> KVCounts:
        """Counts since the last call; asked of engines whose GPUs have several layouts."""
        ...

    async def next_events(self) -> EngineEvents:
        """Wait a moment for something to report; may report progress alone."""
        ...

    async def kill(self) -> None:
        """End it at once, though it hangs, and wait until its processes have left their GPUs.
        Harmless when there are none. Raises `EngineDied` when they do not end."""
        ...

    async def shutdown(self) -> None:
        """Release everything. Safe to call twice."""
        ...
