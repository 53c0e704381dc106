"""The trainer's side of a hand-over: send a policy version by CUDA IPC to engines on its GPUs.

    rank 0   gather ─► file ─► buffer ─┐ rank 0 sends the handles of  ┌─► engine: each worker reads
    rank n   gather ─────────► buffer ─┘ all buffers to all engines ──┘   the buffer on its own GPU

vLLM's trainer class fills the buffers, waits until all engines have copied them, and fills them
again. If an engine dies, fails or does not answer, we leave it out from then on, and it loads the
file instead.

Known limit: if a dead engine had a buffer open, the trainer cannot free it until its own process
ends, because torch counts the openers.
"""

import asyncio
import base64
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from refrain.engines.actors import ActorError, RemoteActor
from refrain.engines.machine.shared_gpu import HANDED_AT_ONCE_BYTES

if TYPE_CHECKING:
    from refrain.engines.learn.publishing import WholeTensors


@dataclass(frozen=True, slots=True)
class HandOver:
    """The engines that receive weights from a trainer on their GPUs."""

    engines: Mapping[int, Any]
    """Ray's handle of each engine, by index."""
    limit_s: float
    """Longest time to wait for an engine's answer."""

    def send(self, rank: int, policy_version: int, whole: "WholeTensors") -> tuple[str, ...]:
        """Send the tensors to all engines. Every rank of the trainer must call this.

        Return a message for each engine that failed. The call imports vLLM in this process.
        """
        # Importing vLLM takes half a minute, so import it only if needed.
        from refrain.engines.inference.weights.ipc import send_weights

        client = self.client(policy_version)
        sizes = (prod(shape) * whole.dtype.itemsize for shape in whole.shapes.values())
        send_weights(client, rank, whole, buffer_bytes=max(HANDED_AT_ONCE_BYTES, *sizes))
        return tuple(client.failures)

    def client(self, policy_version: int) -> "EnginesOfTrainer":
        return EnginesOfTrainer(self, policy_version)


class EnginesOfTrainer:
    """All engines behind vLLM's interface for its trainer class (`VLLMWeightSyncClient`)."""

    def __init__(self, to: HandOver, policy_version: int) -> None:
        self._actors = [
            RemoteActor.of(f"rollout engine {index}", actor) for index, actor in to.engines.items()
        ]
        self._policy_version = policy_version
        self._limit_s = to.limit_s
        self.failures: list[str] = []
        """Message of each engine that failed."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        assert isinstance(update_info, dict)
        self._call("update_weights", _pickled(update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        del weight_version  # vLLM's trainer class does not know our policy version.
        self._call("finish_weight_update", self._policy_version)

    def _call(self, method: str, *args: Any) -> None:
        """Call a method of all engines. Leave out engines that fail from now on."""
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
    """Pickle the IPC handles, so that they pass through all of vLLM's message channels."""
    rest = {name: value for name, value in update_info.items() if name != "ipc_handles"}
    handles = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
    return rest | {"ipc_handles_pickled": handles}
