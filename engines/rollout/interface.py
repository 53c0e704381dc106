"""Interface of a rollout engine, real or simulated, to the coordinator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from refrain.schemas.counts import DraftingCounts, KVCounts
from refrain.schemas.rollout import (
    DraftProgress,
    DraftSetting,
    FinishedRollout,
    RequestId,
    Rollout,
    RolloutRequest,
    SavedKV,
)
from refrain.schemas.weights import PolicyWeights


class EngineDied(RuntimeError):
    """An engine is dead or does not answer. Other engines can take its requests."""

    def __init__(self, engine: int, cause: str, root: str = "") -> None:
        """`root`: message of the error that ended the engine. Empty when the engine was killed or
        does not answer."""
        super().__init__(f"rollout engine {engine} died: {cause}")
        self.engine = engine
        self.root = root


class EngineFails(EngineDied):
    """An engine died of the same error twice without a finished rollout, so a restart is
    pointless."""


class EngineGone(EngineDied):
    """An engine is dead, and the cluster has no room to restart it."""


class WeightSyncError(RuntimeError):
    """An engine's log-probabilities differ from the trainer's. Generation must not start."""


class WeightsLost(WeightSyncError):
    """The weights no longer exist: their trainer died or has replaced them by a later version."""


Finished = Rollout | FinishedRollout
"""A finished rollout. Simulated engines return all of it. Real engines return a reference to the
tokens, which only the store reads."""


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Events of one engine since the last report."""

    finished: tuple[Finished, ...] = ()
    progress: Mapping[RequestId, int] = field(default_factory=dict)
    """Response tokens so far of every unfinished request."""
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    """Drafting state of the unfinished requests that have drafts. May be slightly old, and may
    lack requests that were just submitted."""
    num_waiting: int = 0
    """Unfinished requests that wait for their environment."""


class Engine(Protocol):
    """Rollout engine that generates requests.

    Every method raises `EngineDied` when the engine is dead, and has a time limit.
    """

    index: int
    tp_degree: int

    @property
    def node_id(self) -> str | None:
        """Node whose memory the engine shares with others. None: unknown."""
        ...

    async def start(self) -> None:
        """Start the engine, or restart it after its death, without requests or weights. Raises
        `EngineGone` when the cluster has no room for it and will not have any."""
        ...

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Add requests. Requests with `generated` tokens continue after them."""
        ...

    async def withdraw(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Remove requests and return them with their generated tokens. A request that has finished
        meanwhile is not returned: it arrives as an event. `keep_kv`: save their keys and values
        too, where possible; they are kept until the next weights are loaded."""
        ...

    async def precopy(self, ids: Sequence[RequestId]) -> SavedKV | None:
        """Save the keys and values of these requests so far, while they continue. `withdraw` then
        has less to save before they move to engines of the same node. Returns after the copy, or
        None if nothing was saved."""
        ...

    async def expect_kv(self, saved: Sequence[SavedKV]) -> None:
        """Prepare for loading keys and values that others saved, while another layout has the
        GPUs. The requests may or may not arrive."""
        ...

    async def copy(
        self, ids: Sequence[RequestId], *, keep_kv: bool = False
    ) -> list[RolloutRequest]:
        """Return requests with their tokens so far; the requests continue here. A request that has
        finished meanwhile is not returned. `keep_kv`: save keys and values too, where possible.
        They are kept for a minute."""
        ...

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        """Change the drafting settings of these requests. Ignore requests that are not here."""
        ...

    async def load_weights(self, weights: PolicyWeights) -> float:
        """Load a policy version. The engine must be empty.

        Returns the largest mean |trainer - engine| log-probability over the canaries.
        Raises `WeightSyncError` when it exceeds the tolerance.
        """
        ...

    async def park(self) -> None:
        """Release the GPUs to engines of another layout. The engine must be empty until `wake`. A
        parked engine that keeps weights still takes `load_weights`."""
        ...

    async def sleep(self) -> None:
        """Release the GPUs to the trainer and discard the weights. The engine must be empty until
        `wake` and `load_weights`. A parked engine stays parked."""
        ...

    async def wake(self) -> bool:
        """Take the GPUs back. Return False if the weights are lost and must be loaded."""
        ...

    async def take_drafting_counts(self) -> DraftingCounts:
        """Return the counts since the last call."""
        ...

    async def take_kv_counts(self) -> KVCounts:
        """Return the counts since the last call. Called only if the GPUs have several layouts, or
        requests took keys and values along."""
        ...

    async def next_events(self) -> EngineEvents:
        """Wait briefly for events and return them. The report may hold progress only."""
        ...

    async def kill(self) -> None:
        """Kill the engine, even if it hangs, and wait until its processes have left their GPUs.
        Does nothing without processes. Raises `EngineDied` when they do not end."""
        ...

    async def shutdown(self) -> None:
        """Release everything. Safe to call twice."""
        ...
