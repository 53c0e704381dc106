"""One engine as the coordinator sees it: what it works on, and what it did when.

A call that finds the engine dead raises nothing here: the engine's pump meets the same death and
reports it. Meanwhile its requests stay among the unfinished, from where they are rescued.

The coordinator's record of a request is the one that counts; from an engine comes only what was
generated. So a setting for its drafting goes with the request, wherever that goes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

from engines.rollout.interface import Engine, EngineDied, EngineEvents
from engines.rollout.moves import EngineView
from engines.rollout.phase import Phase, Tally
from schemas.rollout import (
    DraftingCounts,
    DraftProgress,
    DraftSetting,
    RequestId,
    RolloutRequest,
)
from schemas.timeline import Doing, Span

Fetch = Callable[[Sequence[RequestId]], Awaitable[list[RolloutRequest]]]


@dataclass(slots=True, eq=False)
class Lane:
    """An engine with its queue of sub-batches (RhymeRL, section 4.2).

    It works on one phase at a time and goes to the next when it has nothing left, so all that is
    on it was submitted under one policy version.
    """

    engine: Engine
    alive: bool = True
    version: int | None = None
    """Policy version of its weights; None when it has none."""
    phase: Phase | None = None
    """It works on this one, or did last."""
    waiting: deque[Phase] = field(default_factory=deque)
    """Phases to come."""
    entering: bool = False
    """It takes the weights of its phase; requests wait."""
    unfinished: dict[RequestId, RolloutRequest] = field(default_factory=dict)
    """Of its phase."""
    progress: Mapping[RequestId, int] = field(default_factory=dict)
    drafting: Mapping[RequestId, DraftProgress] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    """What it did when, on the event loop's clock."""
    seen: EngineView | None = None
    """The last view of it; None once something has changed, so that one event among hundreds of
    engines costs one new view."""

    @property
    def index(self) -> int:
        return self.engine.index

    @property
    def tally(self) -> Tally:
        assert self.phase is not None
        return self.phase.tallies[self.index]

    @property
    def free(self) -> bool:
        """It could begin the next phase."""
        return self.alive and not self.entering and not self.unfinished

    @property
    def takes_requests(self) -> bool:
        """What is submitted now starts now."""
        return self.alive and not self.entering

    def is_at(self, phase: Phase) -> bool:
        """It works on the phase, or waits for another since it ended its part."""
        return self.alive and self.phase is phase

    def expect(self, requests: Iterable[RolloutRequest]) -> None:
        self.unfinished.update((request.id, request) for request in requests)
        self.seen = None

    def forget(self, id: RequestId) -> bool:
        """False when it had no such request."""
        self.seen = None
        found = self.unfinished.pop(id, None) is not None
        if not self.unfinished and self.takes_requests:
            self.rest()
        return found

    def hear(self, events: EngineEvents) -> None:
        """What is told of requests that are not here, or no more, is not seen."""
        self.progress, self.drafting, self.seen = events.progress, events.drafting, None

    def num_tokens(self, id: RequestId) -> int:
        """Response tokens of an unfinished request, as the engine last told."""
        return self.progress.get(id, 0)

    def view(self) -> EngineView:
        if self.seen is None:
            progress = {id: self.num_tokens(id) for id in self.unfinished}
            drafting = {id: self.drafting[id] for id in self.unfinished if id in self.drafting}
            self.seen = EngineView(self.index, progress, drafting)
        return self.seen

    # What it does when

    def begin(self, doing: Doing, label: str = "") -> None:
        """From now on it does this."""
        open_span = self.spans[-1] if self.spans and self.spans[-1].end_s is None else None
        if open_span and (open_span.doing, open_span.label) == (doing, label):
            return
        self.rest()
        self.spans.append(Span(self.index, doing, label, now_s()))

    def rest(self) -> None:
        """From now on it has nothing to do."""
        if not self.spans or self.spans[-1].end_s is not None:
            return
        span = self.spans[-1]
        span.end_s = now_s()
        if span.doing is Doing.ROLLOUT:
            self.tally.busy_s += span.end_s - span.start_s

    # What it asks of its engine

    async def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Some of its unfinished requests."""
        if not requests:
            return
        assert self.takes_requests
        assert self.phase is not None
        self.begin(Doing.ROLLOUT, self.phase.label)
        with suppress(EngineDied):
            await self.engine.submit(requests)

    async def give(self, requests: Sequence[RolloutRequest]) -> None:
        """Add to what it does in its present phase."""
        self.expect(requests)
        if self.takes_requests:
            await self.submit(requests)

    async def take(self, ids: Sequence[RequestId]) -> list[RolloutRequest]:
        """Requests away from it; those that have finished meanwhile are left out and stay."""
        taken = await self._fetch(ids, self.engine.withdraw)
        for request in taken:
            self.forget(request.id)
        return taken

    async def copy(self, id: RequestId) -> list[RolloutRequest]:
        """The request, which goes on here; nothing when it has finished meanwhile."""
        return await self._fetch([id], self.engine.copy)

    async def redraft(self, settings: Mapping[RequestId, DraftSetting]) -> None:
        """Draft so for these unfinished requests from now on."""
        self.expect(replace(self.unfinished[id], drafting=s) for id, s in settings.items())
        if self.takes_requests:
            with suppress(EngineDied):
                await self.engine.redraft(settings)

    async def count_drafting(self) -> None:
        """Add what drafting did since the last call to the phase's tally."""
        with suppress(EngineDied):
            new, old = await self.engine.take_drafting_counts(), self.tally.drafting
            sums = (getattr(old, f.name) + getattr(new, f.name) for f in fields(old))
            self.tally.drafting = DraftingCounts(*sums)

    async def _fetch(self, ids: Sequence[RequestId], call: Fetch) -> list[RolloutRequest]:
        """Unfinished requests with what was generated."""
        if not self.takes_requests:
            return [self.unfinished[id] for id in ids]
        try:
            fetched = await call(ids)
        except EngineDied:
            return []
        return [replace(self.unfinished[r.id], generated=r.generated) for r in fetched]


def now_s() -> float:
    """Of the event loop's clock, which a simulation may have made its own."""
    return asyncio.get_running_loop().time()
