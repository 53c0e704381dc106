"""The trainer's side of a hand-over: a policy version to the engines on its GPUs by CUDA IPC.

    rank 0   gathered ─► file ─► buffer ─┐ handles of all buffers by their ┌─► engine: each worker
    rank n   gathered ─────────► buffer ─┘ GPUs, from rank 0 to all ───────┘   that of its own GPU

vLLM's trainer class fills the buffers, and goes on when all engines have taken what is in them. An
engine that dies, fails or does not answer is left out from there on, and takes the file.

Deviation: a buffer that a dead engine had open stays with the trainer until its process ends, as
torch counts who has it open.
"""

import asyncio
import base64
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from engines.actors import ActorError, RemoteActor
from engines.machine.shared_gpu import HANDED_AT_ONCE_BYTES

if TYPE_CHECKING:
    from engines.learn.published import WholeTensors


@dataclass(frozen=True, slots=True)
class HandOver:
    """Engines that take weights from the trainer on their GPUs."""

    engines: Mapping[int, Any]
    """Ray's handle of each, by its index."""
    limit_s: float
    """Longest wait for an answer of one."""

    def send(self, rank: int, policy_version: int, whole: "WholeTensors") -> tuple[str, ...]:
        """Hand these to all, on every rank of the trainer; engines that did not take them, and
        why. vLLM is loaded in this process."""
        # Only here: it takes half a minute.
        from engines.inference.weights.ipc import send_weights

        client = self.client(policy_version)
        sizes = (prod(shape) * whole.dtype.itemsize for shape in whole.shapes.values())
        send_weights(client, rank, whole, buffer_bytes=max(HANDED_AT_ONCE_BYTES, *sizes))
        return tuple(client.failures)

    def client(self, policy_version: int) -> "EnginesOfTrainer":
        return EnginesOfTrainer(self, policy_version)


class EnginesOfTrainer:
    """All engines as one, for vLLM's trainer class: its `VLLMWeightSyncClient`."""

    def __init__(self, to: HandOver, policy_version: int) -> None:
        self._actors = [
            RemoteActor.of(f"rollout engine {index}", actor) for index, actor in to.engines.items()
        ]
        self._policy_version = policy_version
        self._limit_s = to.limit_s
        self.failures: list[str] = []
        """Engines that did not take all, and why."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        assert isinstance(update_info, dict)
        self._call("update_weights", _pickled(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # vLLM's trainer knows none.
        self._call("finish_weight_update", self._policy_version)

    def _call(self, method: str, *args: Any) -> None:
        """Have all do this, and leave out those that fail to."""
        results = asyncio.run(self._results(method, args))
        failed = [isinstance(result, ActorError) for result in results]
        self.failures += [str(result) for result, bad in zip(results, failed, strict=True) if bad]
        self._actors = [a for a, bad in zip(self._actors, failed, strict=True) if not bad]

    async def _results(self, method: str, args: tuple[Any, ...]) -> list[ActorError | None]:
        return await asyncio.gather(*(self._ask(actor, method, args) for actor in self._actors))

    async def _ask(
        self, actor: RemoteActor, method: str, args: tuple[Any, ...]
    ) -> ActorError | None:
        try:
            await actor.call("take_handed", method, *args, timeout_s=self._limit_s)
        except ActorError as error:
            return error
        return None


def _pickled(update_info: dict[str, Any]) -> dict[str, Any]:
    """The same with handles that go through any of vLLM's channels."""
    rest = {name: value for name, value in update_info.items() if name != "ipc_handles"}
    handles = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
    return rest | {"ipc_handles_pickled": handles}
