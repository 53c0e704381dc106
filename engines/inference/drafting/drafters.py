"""The drafter processes of a run: start them, watch them, restart them, connect engines to them.

Drafts are optional. When a drafter dies, rollouts go on without it while it restarts. A drafter
that dies too often stays off.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

from refrain.engines.actors import ActorError, RemoteActor
from refrain.engines.bounded import cancel, gather_all
from refrain.engines.inference.drafting.vllm_drafter import VLLMDrafter
from refrain.engines.inference.engine.ray_engine import RayEngine
from refrain.engines.rollout.interface import EngineDied
from refrain.schemas.counts import StreamCounts
from refrain.schemas.drafting import DrafterConfig

WATCH_S = 2.0
"""Seconds between two checks of a drafter."""
ANSWER_S = 60.0
"""Seconds within which a running drafter must answer."""


class Drafter:
    """A drafter of the run. Each restart replaces its Ray actor."""

    def __init__(
        self, config: DrafterConfig, num_gpus: int, node: str | None, on_cluster: bool
    ) -> None:
        """Describe a drafter. `node`: the preferred Ray node. `on_cluster`: see `Drafters`."""
        self.config = config
        self.counts = StreamCounts()
        """Counts since the last `Drafters.take_counts`, kept over restarts."""
        self._num_gpus = num_gpus
        self._node = node
        self._on_cluster = on_cluster
        self._actor: RemoteActor | None = None

    async def start(self) -> str:
        """Start or restart the actor. Return the address that it serves."""
        self.kill()
        self._actor = RemoteActor(
            f"drafter {self.config.name}",
            VLLMDrafter,
            self.config,
            self._on_cluster,
            num_gpus=self._num_gpus,
            node_id=self._node,
            soft=True,
            max_concurrency=64,
        )
        return await self._actor.call("start", timeout_s=self.config.start_timeout_s)

    async def look(self) -> None:
        """Fetch the actor's counts, if there is an actor. Raise `ActorError` if it has died."""
        if self._actor:
            self.counts.add(await self._actor.call("take_counts", timeout_s=ANSWER_S))

    async def shutdown(self) -> None:
        if self._actor:
            await self._actor.stop()

    def kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor:
            actor.kill()


MAX_RESTARTS = 3
"""Restarts of a drafter that a run allows. Then rollouts go on without it."""


class Drafters:
    """All drafters of a run. Drafters with the same name divide the engines among themselves."""

    def __init__(
        self,
        configs: Sequence[DrafterConfig],
        engines: Sequence[RayEngine],
        log: Callable[[str], None],
        num_gpus: int = 0,
        nodes: Sequence[str | None] | None = None,
        *,
        on_cluster: bool = False,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        """Describe the drafters; `start` starts them.

        `log` logs deaths. `num_gpus`: GPUs of each drafter. `nodes`: the preferred Ray node of
        each. `on_cluster`: serve on an address that other machines can reach, because the cluster
        has or may get some.
        """
        anywhere = [None] * len(configs)
        self._drafters = [
            Drafter(config, num_gpus, node, on_cluster)
            for config, node in zip(configs, nodes or anywhere, strict=True)
        ]
        self._engines = engines
        self._max_restarts = max_restarts
        self._log = log
        self._num_restarts: Counter[Drafter] = Counter()
        self._watches: list[asyncio.Task] = []

    async def start(self) -> None:
        """Start all drafters. Raise `ActorError` if one fails to start."""
        addresses = await gather_all(drafter.start() for drafter in self._drafters)
        for drafter, address in zip(self._drafters, addresses, strict=True):
            await self._connect(drafter, address)
        self._watches = [asyncio.create_task(self._watch(one)) for one in self._drafters]

    async def take_counts(self) -> dict[str, StreamCounts]:
        """Return each drafter's counts since the last call, by name.

        When a drafter dies, its counts since the last check (`WATCH_S`) are lost.
        """
        counts: dict[str, StreamCounts] = {}
        for drafter in self._drafters:
            with contextlib.suppress(ActorError):
                await drafter.look()
            counts.setdefault(drafter.config.name, StreamCounts()).add(drafter.counts)
            drafter.counts = StreamCounts()
        return counts

    async def shutdown(self) -> None:
        await cancel(self._watches)
        await gather_all(drafter.shutdown() for drafter in self._drafters)

    async def _watch(self, drafter: Drafter) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await drafter.look()
            except ActorError as death:
                if not await self._restart(drafter, death):
                    return

    async def _restart(self, drafter: Drafter, death: ActorError) -> bool:
        """Restart a dead drafter. Return False if it died too often."""
        name, why = drafter.config.name, death.why
        while self._num_restarts[drafter] < self._max_restarts:
            self._num_restarts[drafter] += 1
            self._log(f"drafter {name} died ({why}); restarting it")
            try:
                await self._connect(drafter, await drafter.start())
            except ActorError as again:
                why = again.why
            else:
                return True
        drafter.kill()
        self._log(f"drafter {name} died too often ({why}); rollouts continue without it")
        return False

    async def _connect(self, drafter: Drafter, address: str) -> None:
        """Connect this drafter's share of the engines to its address."""
        namesakes = [d for d in self._drafters if d.config.name == drafter.config.name]
        place = namesakes.index(drafter)
        for engine in self._engines[place :: len(namesakes)]:
            # An engine that is restarting connects once it has started.
            with contextlib.suppress(EngineDied):
                await engine.connect_drafters({drafter.config.name: address})
