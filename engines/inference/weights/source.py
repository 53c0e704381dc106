"""The file that a policy version is loaded from: on this node, whole and of that version."""

from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from engines.actors import ActorError, ActorGone, RemoteActor
from engines.couriers import courier_of
from engines.rollout.interface import WeightsLost, WeightSyncError
from engines.shared_memory import memory_file
from engines.weights_file import LostFile, WrongFile, check_file
from schemas.weights import PolicyWeights, WeightsFile


class WeightSources:
    """Ways of one engine to the file of its weights."""

    def __init__(self, engine: int, timeout_s: float) -> None:
        """`timeout_s`: longest wait for weights that come from another node."""
        self._engine = engine
        self._timeout_s = timeout_s
        self._courier: RemoteActor | None = None

    @asynccontextmanager
    async def file_of(self, weights: PolicyWeights) -> AsyncGenerator[Path]:
        """A file with these weights, while this lasts. Raises `WeightSyncError` when it is not
        theirs, before it is read or after."""
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
        # Its memory may have become that of a later version meanwhile.
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
            # It went with whoever had started it, another engine perhaps.
            self._courier = None
            return await self._ask(node_id, policy_version, file)

    async def _ask(self, node_id: str, policy_version: int, file: WeightsFile) -> Path:
        # Kept: one that this engine was the first to ask for lives as long as this.
        courier = self._courier = self._courier or courier_of(node_id)
        try:
            return await courier.call("bring", policy_version, file, timeout_s=self._timeout_s)
        except ActorGone:
            raise
        except ActorError as error:
            raise WeightSyncError(
                f"policy version {policy_version} did not come to the node of engine "
                f"{self._engine}: {error}"
            ) from error

    @contextmanager
    def _checked(self) -> Generator[None]:
        try:
            yield
        except WrongFile as error:
            kind = WeightsLost if isinstance(error, LostFile) else WeightSyncError
            raise kind(f"engine {self._engine}: {error}") from error
