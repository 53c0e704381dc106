"""When the GPUs of a node change their TP degree, and to which (PAT, Algorithm 1). Pure.

    T_cur   the slowest of the pool's engines, each with its own requests               (line 4)
    TP'     of every other layout: all requests, dealt anew over its engines            (line 7)
            T_rem + T_switch, the slowest engine again                              (lines 8, 9)
    switch  to the least of these, if it is below T_cur                                (line 15)

T is `engines.latency.forecast.finish_s`: requests end one by one, each drafted for as it is.
The algorithm runs again after a switch, so that there may be several in one stage.

Deviations:
- Remaining lengths are an estimate of each response (`remaining.py`); `Maximum` is the paper's.
- Lower TP degrees are candidates too.
- Requests are dealt as they are when the switch is made: the longest context first, each to the
  engine with the least. The paper says "merge and redistribute".
- A pool is looked at again when a share of its requests has ended or one of them has generated so
  many tokens since, so that decisions are cheap: they are later by that at most. The paper does not
  say how often its algorithm runs.
- Pools decide for themselves, as nodes do in the paper (4.1).
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engines.latency.forecast import Unfinished, finish_s
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCost, SwitchCosts
from engines.pat.remaining import Remaining
from engines.rollout.moves import EngineView, Reshape, RolloutView
from schemas.layout import Pool
from schemas.rollout import DraftProgress, RequestId


@dataclass(frozen=True, slots=True)
class Candidate:
    """Another layout of a pool, as it would go on there."""

    tp_degree: int
    remaining_s: float
    """Until all are finished, from the switch on."""
    switch: SwitchCost

    @property
    def seconds(self) -> float:
        return self.remaining_s + self.switch.seconds


@dataclass(frozen=True, slots=True)
class Comparison:
    """One look at a pool."""

    pool: int
    elapsed_s: float
    """Since the phase began."""
    num_unfinished: int
    tp_degree: int
    """Of the present layout."""
    current_s: float
    """Until all are finished there."""
    candidates: tuple[Candidate, ...]
    """By TP degree, ascending."""

    @property
    def best(self) -> Candidate:
        """The fastest of the others; of equal ones the lowest TP degree."""
        return min(self.candidates, key=lambda candidate: candidate.seconds)

    @property
    def gain_s(self) -> float:
        """What a switch to the best saves; below 0 if it costs more."""
        return self.current_s - self.best.seconds


@dataclass(frozen=True, slots=True)
class Stage:
    """What forecasts of one stage rest on."""

    latency: Latency
    costs: SwitchCosts
    remaining: Remaining
    prompt_tokens: Mapping[str, int]
    """By prompt key."""
    max_num_seqs: Mapping[int, int]
    """That one engine decodes at once, by TP degree."""
    default_drafting: tuple[float, int] = (1.0, 0)
    """(tokens per forward pass, window) of requests of which no drafting is known."""

    def compare(self, pool: Pool, view: RolloutView) -> Comparison | None:
        """None unless all engines of one layout are in view, and have something unfinished."""
        working = present_layout(pool, view)
        if working is None or not any(engine.progress for engine in working):
            return None
        present = working[0].tp_degree
        sources = self._batches(working)
        others = sorted(degree for degree in pool.engines if degree != present)
        return Comparison(
            pool=pool.index,
            elapsed_s=view.elapsed_s,
            num_unfinished=sum(map(len, sources)),
            tp_degree=present,
            current_s=self.finish_s(present, sources),
            candidates=tuple(
                self._candidate(present, degree, sources, len(pool.engines[degree]))
                for degree in others
            ),
        )

    def finish_s(self, tp_degree: int, batches: Iterable[Sequence[Unfinished]]) -> float:
        """Until the slowest of these engines has finished."""
        return max(
            finish_s(self.latency, tp_degree, batch, max_num_seqs=self.max_num_seqs[tp_degree])
            for batch in batches
        )

    def _candidate(
        self, present: int, degree: int, sources: list[list[Unfinished]], num_engines: int
    ) -> Candidate:
        targets = redistribute([request for batch in sources for request in batch], num_engines)
        switch = self.costs.cost(present, degree, _contexts(sources), _contexts(targets))
        return Candidate(degree, self.finish_s(degree, targets), switch)

    def _batches(self, engines: Sequence[EngineView]) -> list[list[Unfinished]]:
        remaining = self.remaining.tokens(_progress(engines))
        return [
            [
                self._unfinished(engine, id, num, remaining[id])
                for id, num in engine.progress.items()
            ]
            for engine in engines
        ]

    def _unfinished(
        self, engine: EngineView, id: RequestId, num_tokens: int, remaining: float
    ) -> Unfinished:
        tokens_per_pass, window = self._drafting(engine.drafting.get(id))
        return Unfinished(
            self.prompt_tokens[id.prompt_key] + num_tokens, remaining, tokens_per_pass, window
        )

    def _drafting(self, told: DraftProgress | None) -> tuple[float, int]:
        """A window of w tokens of which a share a is accepted gains 1 + a w tokens."""
        if told is None:
            return self.default_drafting
        if told.setting is None:
            return 1.0, 0
        if told.acceptance_rate is None:
            return self.default_drafting
        return 1.0 + told.acceptance_rate * told.setting.window, told.setting.window


@dataclass(slots=True)
class _Look:
    """The last one at a pool."""

    tp_degree: int
    num_unfinished: int
    num_tokens: int
    """Of the longest response."""


@dataclass
class Switching:
    """Decides for one stage. Remembers when it last looked at each pool."""

    stage: Stage
    pools: Sequence[Pool]
    look_share: float = 1 / 16
    """A pool is looked at again when so much of its requests has ended, one at least, ..."""
    look_tokens: int = 128
    """... or its longest response has so many tokens more."""
    last: dict[int, Comparison] = field(default_factory=dict)
    """The last comparison of each pool."""
    switches: list[Comparison] = field(default_factory=list)
    """Those after which a switch was decided."""
    _looks: dict[int, _Look] = field(default_factory=dict)

    def decide(self, view: RolloutView) -> list[Reshape]:
        moves = (self._look(pool, view) for pool in self.pools if self._due(pool, view))
        return [move for move in moves if move]

    def _look(self, pool: Pool, view: RolloutView) -> Reshape | None:
        comparison = self.stage.compare(pool, view)
        if comparison is None:
            return None
        self.last[pool.index] = comparison
        if comparison.gain_s <= 0:
            return None
        self.switches.append(comparison)
        best = comparison.best
        return Reshape(pool.index, best.tp_degree, best.switch.move_kv)

    def _due(self, pool: Pool, view: RolloutView) -> bool:
        working = present_layout(pool, view)
        if working is None:
            self._looks.pop(pool.index, None)
            return False
        now = _Look(
            working[0].tp_degree,
            sum(len(engine.progress) for engine in working),
            max((max(e.progress.values(), default=0) for e in working), default=0),
        )
        last = self._looks.get(pool.index)
        due = last is None or self._changed(last, now)
        if due:
            self._looks[pool.index] = now
        return due

    def _changed(self, last: _Look, now: _Look) -> bool:
        ended = last.num_unfinished - now.num_unfinished
        return (
            last.tp_degree != now.tp_degree
            or abs(ended) >= max(1.0, self.look_share * last.num_unfinished)
            or abs(now.num_tokens - last.num_tokens) >= self.look_tokens
        )


def present_layout(pool: Pool, view: RolloutView) -> list[EngineView] | None:
    """Engines of the layout that is at work; None unless all of them are in view and no other."""
    engines = {engine.engine: engine for engine in view.engines}
    present = [d for d, of in pool.engines.items() if any(index in engines for index in of)]
    if len(present) != 1 or any(index not in engines for index in pool.engines[present[0]]):
        return None
    return [engines[index] for index in pool.engines[present[0]]]


def redistribute(requests: Sequence[Unfinished], num_engines: int) -> list[list[Unfinished]]:
    """The longest context first, each to the engine with the fewest tokens so far."""
    batches: list[list[Unfinished]] = [[] for _ in range(num_engines)]
    loads = [(0.0, engine) for engine in range(num_engines)]
    for request in sorted(requests, key=lambda request: -request.context_tokens):
        tokens, engine = heapq.heappop(loads)
        batches[engine].append(request)
        heapq.heappush(loads, (tokens + request.context_tokens, engine))
    return batches


def _progress(engines: Iterable[EngineView]) -> dict[RequestId, int]:
    """Of all their requests; of one that is raced the most."""
    progress: dict[RequestId, int] = {}
    for engine in engines:
        for id, num_tokens in engine.progress.items():
            progress[id] = max(num_tokens, progress.get(id, 0))
    return progress


def _contexts(batches: Iterable[Sequence[Unfinished]]) -> list[list[float]]:
    return [[request.context_tokens for request in batch] for batch in batches]
