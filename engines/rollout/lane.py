"""One engine as the coordinator sees it: what it works on, and what it did when."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from engines.rollout.interface import Engine
from engines.rollout.moves import EngineView
from engines.rollout.phase import Phase, Tally
from schemas.rollout import RequestId, RolloutRequest
from schemas.timeline import Doing, Span


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

    def expect(self, requests: Iterable[RolloutRequest]) -> None:
        self.unfinished.update((request.id, request) for request in requests)
        self.seen = None

    def forget(self, id: RequestId) -> bool:
        """False when it had no such request."""
        self.seen = None
        return self.unfinished.pop(id, None) is not None

    def view(self) -> EngineView:
        if self.seen is None:
            progress = {id: self.progress.get(id, 0) for id in self.unfinished}
            self.seen = EngineView(self.index, progress)
        return self.seen

    def begin(self, doing: Doing, now_s: float, label: str = "") -> None:
        """From now on it does this."""
        open_span = self.spans[-1] if self.spans and self.spans[-1].end_s is None else None
        if open_span and (open_span.doing, open_span.label) == (doing, label):
            return
        self.rest(now_s)
        self.spans.append(Span(self.index, doing, label, now_s))

    def rest(self, now_s: float) -> None:
        """From now on it has nothing to do."""
        if not self.spans or self.spans[-1].end_s is not None:
            return
        span = self.spans[-1]
        span.end_s = now_s
        if span.doing is Doing.ROLLOUT:
            self.tally.busy_s += now_s - span.start_s
