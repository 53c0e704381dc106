"""The drafter processes of a run: started, watched, started again, and made known to the engines.

Drafts are optional: a drafter that has died is brought up again while rollouts go on without it,
and is left out when it has died too often.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

from engines.actors import ActorError, RemoteActor
from engines.bounded import all_of, cancel
from engines.inference.drafting.vllm_drafter import VLLMDrafter
from engines.inference.engine.ray_engine import RayEngine
from engines.rollout.interface import EngineDied
from schemas.counts import StreamCounts
from schemas.drafting import DrafterConfig

WATCH_S = 2.0
"""Seconds between two looks at a drafter."""
ANSWER_S = 60.0
"""Longest time for an answer of one that is up."""


class Drafter:
    """One actor at a time."""

    def __init__(
        self, config: DrafterConfig, num_gpus: int, node: str | None, on_cluster: bool
    ) -> None:
        """`node`: where it is to be, if that can be; `on_cluster`: see `Drafters`."""
        self.config = config
        self.counts = StreamCounts()
        """Counts since they were last taken away, over restarts."""
        self._num_gpus = num_gpus
        self._node = node
        self._on_cluster = on_cluster
        self._actor: RemoteActor | None = None

    async def start(self) -> str:
        """Bring it up, or up again; returns its address."""
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
        """Add what it counted, if it is not out of use. Raises `ActorError`."""
        if self._actor:
            self.counts.add(await self._actor.call("take_counts", timeout_s=ANSWER_S))

    async def shutdown(self) -> None:
        if self._actor:
            await self._actor.stop()

    def kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor:
            actor.kill()


class Drafters:
    """All drafters of a run. Those of one name share the engines."""

    def __init__(
        self,
        configs: Sequence[DrafterConfig],
        engines: Sequence[RayEngine],
        max_restarts: int,
        say: Callable[[str], None],
        num_gpus: int = 0,
        nodes: Sequence[str | None] | None = None,
        *,
        on_cluster: bool = False,
    ) -> None:
        """Drafters, not started yet. `num_gpus`: of each; `nodes`: where they are to be, if that
        can be. `say` is told of deaths. `on_cluster`: there are other machines, or may be later, so
        that they serve where those reach them."""
        anywhere = [None] * len(configs)
        self._drafters = [
            Drafter(config, num_gpus, node, on_cluster)
            for config, node in zip(configs, nodes or anywhere, strict=True)
        ]
        self._engines = engines
        self._max_restarts = max_restarts
        self._say = say
        self._num_restarts: Counter[Drafter] = Counter()
        self._watches: list[asyncio.Task] = []

    async def start(self) -> None:
        """Raises `ActorError` when one does not come up."""
        addresses = await all_of(drafter.start() for drafter in self._drafters)
        for drafter, address in zip(self._drafters, addresses, strict=True):
            await self._connect(drafter, address)
        self._watches = [asyncio.create_task(self._watch(one)) for one in self._drafters]

    async def take_counts(self) -> dict[str, StreamCounts]:
        """Counts of each drafter since the last call. What one that died had counted since the last
        look is lost."""
        counts: dict[str, StreamCounts] = {}
        for drafter in self._drafters:
            with contextlib.suppress(ActorError):
                await drafter.look()
            counts.setdefault(drafter.config.name, StreamCounts()).add(drafter.counts)
            drafter.counts = StreamCounts()
        return counts

    async def shutdown(self) -> None:
        await cancel(self._watches)
        await all_of(drafter.shutdown() for drafter in self._drafters)

    async def _watch(self, drafter: Drafter) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await drafter.look()
            except ActorError as death:
                if not await self._mend(drafter, death):
                    return

    async def _mend(self, drafter: Drafter, death: ActorError) -> bool:
        """Whether it is there again."""
        name, why = drafter.config.name, death.why
        while self._num_restarts[drafter] < self._max_restarts:
            self._num_restarts[drafter] += 1
            self._say(f"drafter {name} died ({why}); starting it again")
            try:
                await self._connect(drafter, await drafter.start())
            except ActorError as again:
                why = again.why
            else:
                return True
        drafter.kill()
        self._say(f"drafter {name} died too often ({why}); going on without it")
        return False

    async def _connect(self, drafter: Drafter, address: str) -> None:
        """Tell the engines that it serves where it is."""
        namesakes = [d for d in self._drafters if d.config.name == drafter.config.name]
        place = namesakes.index(drafter)
        for engine in self._engines[place :: len(namesakes)]:
            # One that is being restarted hears of it when it is up.
            with contextlib.suppress(EngineDied):
                await engine.connect_drafters({drafter.config.name: address})
