"""Get the weights file of a policy version on this node, and check it."""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from refrain.engines.actors import ActorError, ActorGone, RemoteActor
from refrain.engines.couriers import courier_of
from refrain.engines.rollout.interface import WeightsLost, WeightSyncError
from refrain.engines.shared_memory import memory_file
from refrain.engines.weights_file import LostFile, WrongFile, check_file
from refrain.schemas.weights import PolicyWeights, WeightsFile


class WeightSources:
    """Finds the weights files of one engine."""

    def __init__(self, engine: int, timeout_s: float) -> None:
        """`timeout_s`: longest wait for weights from another node."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._courier: RemoteActor | None = None

    async def load(self, llm: Any, weights: PolicyWeights) -> None:
        """Load these weights into an engine. Raise `WeightSyncError` as `file_of` does. `llm`:
        vLLM's `AsyncLLM`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async with self.file_of(weights) as path:
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest({"path": str(path)}))
            await llm.finish_weight_update(str(weights.policy_version))

    @asynccontextmanager
    async def file_of(self, weights: PolicyWeights) -> AsyncGenerator[Path]:
        """Provide a file with these weights during the block.

        Raise `WeightSyncError` if the file has other content, before the block or after it.
        """
        source, version = weights.source, weights.policy_version
        assert source is not None, "nothing to load"
        if isinstance(source, bytes):
            with memory_file(f"refrain weights {version}", source) as path:
                with self._checked():
                    check_file(path, version)
                yield path
            return
        path = await self._on_this_node(version, source)
        with self._checked():
            check_file(path, version)
        yield path
        # A later version may have reused the file's memory while it was read.
        with self._checked():
            check_file(path, version)

    async def _on_this_node(self, policy_version: int, file: WeightsFile) -> Path:
        if file.node_id is None:
            return file.path
        import ray

        node_id = ray.get_runtime_context().get_node_id()
        if file.node_id == node_id:
            return file.path
        try:
            return await self._ask(node_id, policy_version, file)
        except ActorGone:
            # The courier died with the process that started it, which may be another engine.
            self._courier = None
            return await self._ask(node_id, policy_version, file)

    async def _ask(self, node_id: str, policy_version: int, file: WeightsFile) -> Path:
        # Keep the handle: a courier that this engine has started lives as long as its handle.
        courier = self._courier = self._courier or courier_of(node_id)
        try:
            return await courier.call("fetch", policy_version, file, timeout_s=self._timeout_s)
        except ActorGone:
            raise
        except ActorError as error:
            raise WeightSyncError(
                f"policy version {policy_version} did not reach the node of engine "
                f"{self._engine}: {error}"
            ) from error

    @contextmanager
    def _checked(self) -> Generator[None]:
        try:
            yield
        except WrongFile as error:
            kind = WeightsLost if isinstance(error, LostFile) else WeightSyncError
            raise kind(f"engine {self._engine}: {error}") from error
