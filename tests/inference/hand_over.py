"""An engine and trainer ranks that hand weights over on stand-ins for GPUs, and ways in which the
hand-over can fail."""

import base64
import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import ray
import torch

from refrain.engines.inference.weights import hand_over
from refrain.engines.learn.trainer import TrainerActor
from refrain.schemas.config import EngineConfig, TrainConfig
from refrain.schemas.engine import EngineSetup
from tests.inference.pace import PacedEngine
from tests.stand_in_ipc import stand_in, stand_in_worker

GPUS = ("GPU-0", "GPU-1")
ENGINES_GPU = GPUS[1]
BUFFER_BYTES = 2**16
SILENT_S = 30.0


class EngineWithGpu(PacedEngine):
    """An engine on the GPU of the last rank."""

    def __init__(self, index: int, config: EngineConfig, setup: EngineSetup) -> None:
        rollout = config.rollout.model_copy(update={"weight_sync": "ipc"})
        super().__init__(index, config.model_copy(update={"rollout": rollout}), setup)

    async def start(self) -> None:
        await super().start()
        await self._llm.collective_rpc(stand_in_worker, args=(ENGINES_GPU,))


class RankWithGpu(TrainerActor):
    """A rank on the GPU with its number. It hands weights over in small pieces."""

    def __init__(self, config: TrainConfig, rank: int) -> None:
        super().__init__(config, rank)
        hand_over.HANDED_AT_ONCE_BYTES = BUFFER_BYTES
        stand_in(GPUS[rank])

    def change(self, policy_version: int) -> None:
        """Change the weights so much that the canary can tell the versions apart."""
        self._learner.policy_version = policy_version
        with torch.no_grad():
            for parameter in self._learner._policy.parameters():
                parameter.mul_(1.0 + 0.05 * policy_version)


@ray.remote(num_cpus=0)
def _silent() -> None:
    time.sleep(SILENT_S)


@dataclass
class Disturbed:
    """An engine's handle that disturbs the weight updates from the second one on.

    `how` names one of the methods below.
    """

    handle: Any
    how: str
    num_updates: int = 0
    held: list[Any] = field(default_factory=list)

    @property
    def take_handed(self) -> "Disturbed":
        return self

    @property
    def options(self) -> Any:
        raise AssertionError("the hand-over uses no actor options")

    def remote(self, method: str, *args: Any) -> Any:
        if method != "update_weights":
            return self.handle.take_handed.remote(method, *args)
        self.num_updates += 1
        return getattr(self, self.how)(*args)

    def _go_on(self, update: dict[str, Any]) -> Any:
        return self.handle.take_handed.remote("update_weights", update)

    def counted(self, update: dict[str, Any]) -> Any:
        return self._go_on(update)

    def lost(self, update: dict[str, Any]) -> Any:
        """The second update never arrives."""
        return ray.put(None) if self.num_updates == 2 else self._go_on(update)

    def late(self, update: dict[str, Any]) -> Any:
        """The second update arrives when its buffer already holds the tensors of the next."""
        if self.num_updates == 2:
            self.held.append(update)
            return ray.put(None)
        if self.held:
            ray.get(self._go_on(self.held.pop()), timeout=SILENT_S)
        return self._go_on(update)

    def elsewhere(self, update: dict[str, Any]) -> Any:
        """The updates have no handle for the engine's GPU."""
        if self.num_updates < 2:
            return self._go_on(update)
        handles = pickle.loads(base64.b64decode(update["ipc_handles_pickled"]))
        del handles[ENGINES_GPU]
        text = base64.b64encode(pickle.dumps(handles)).decode()
        return self._go_on(update | {"ipc_handles_pickled": text})

    def silent(self, update: dict[str, Any]) -> Any:
        return self._go_on(update) if self.num_updates < 2 else _silent.remote()

    def killed(self, update: dict[str, Any]) -> Any:
        if self.num_updates == 2:
            ray.kill(self.handle)
        return self._go_on(update)
