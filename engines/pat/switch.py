"""When the GPUs of a node change their TP degree, and to which (PAT, Algorithm 1). Pure.

    T_cur   the slowest of the pool's engines, each with its own requests               (line 4)
    TP'     of every other layout: all requests, dealt anew over its engines            (line 7)
            T_rem + T_switch, the slowest engine again                              (lines 8, 9)
    switch  to the least of these, if it is below T_cur                                (line 15)
            and no later switch is forecast to be better still

T is `engines.latency.forecast`: requests end one by one, each drafted for as it is.
The algorithm runs again after a switch, so that there may be several in one stage.

Deviations:
- Remaining lengths are an estimate of each response (`remaining.py`); `Maximum` is the paper's.
- The paper weighs switching now against never. That is enough where all samples are taken to run to
  the same end, as a higher TP degree then pays only once it decodes the present batch faster. When
  the forecast knows of the tail, switching pays from the start, and is best put off until the tail
  comes. So it is also weighed against switching later, and T_rem is with further switches
  (`wait_shares`; none gives the paper's rule).
- Only higher TP degrees are candidates, unless `lower`. A batch that shrinks has no use for a lower
  one; by lengths that are taken to be the maximum it may seem so, again and again.
- Requests are dealt as they are when the switch is made: the longest context first, each to the
  engine with the least. The paper says "merge and redistribute".
- A raced request counts once, where it has the most tokens.
- A pool is looked at again when a share of its requests has ended or one of them has generated so
  many tokens since, so that decisions are cheap: they are later by that at most. The paper does not
  say how often its algorithm runs.
- Pools decide for themselves, as nodes do in the paper (4.1).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.balance import longest_first
from engines.latency.forecast import BatchForecast, Unfinished, forecast
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
    """Until all are finished, from the switch on; there, or by a further switch later."""
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
    later_s: float = math.inf
    """Going on first and switching then, at the best of some later moments; infinite where that was
    not looked at."""

    @property
    def best(self) -> Candidate:
        """The fastest of the others; of equal ones the lowest TP degree."""
        return min(self.candidates, key=lambda candidate: candidate.seconds)

    @property
    def gain_s(self) -> float:
        """What a switch to the best saves; below 0 if it costs more."""
        return self.current_s - self.best.seconds

    @property
    def pays(self) -> bool:
        """Now is better than never and no worse than later."""
        return self.gain_s > 0 and self.best.seconds <= self.later_s


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
    wait_shares: tuple[float, ...] = (1 / 32, 1 / 8, 1 / 3)
    """Later moments of a switch that are looked at, as shares of the time until all are finished
    without it, below 1."""
    lower: bool = False
    """Lower TP degrees are candidates too."""

    def compare(self, pool: Pool, view: RolloutView) -> Comparison | None:
        """None unless all engines of one layout are in view and have something unfinished, and
        there is another layout to go to."""
        working = present_layout(pool, view)
        if working is None or not any(engine.progress for engine in working):
            return None
        present = working[0].tp_degree
        if not self._others(pool, present):
            return None
        courses = [self._course(present, batch) for batch in self._batches(working) if batch]
        now = Comparison(
            pool=pool.index,
            elapsed_s=view.elapsed_s,
            num_unfinished=sum(len(course.requests) for course in courses),
            tp_degree=present,
            current_s=_finish_s(courses),
            candidates=self._candidates(pool, present, [course.requests for course in courses]),
        )
        return (
            replace(now, later_s=self._later_s(pool, present, courses)) if now.gain_s > 0 else now
        )

    def _later_s(self, pool: Pool, present: int, courses: Sequence[BatchForecast]) -> float:
        """The best of going on for a while and switching then."""
        if not self._others(pool, present):
            return math.inf
        waits_s = [share * _finish_s(courses) for share in self.wait_shares]
        return min((self._waiting_s(pool, present, courses, s) for s in waits_s), default=math.inf)

    def _waiting_s(
        self, pool: Pool, present: int, courses: Sequence[BatchForecast], wait_s: float
    ) -> float:
        sources = [course.after(wait_s) for course in courses]
        candidates = self._candidates(pool, present, sources)
        return wait_s + min(candidate.seconds for candidate in candidates)

    def _candidates(
        self, pool: Pool, present: int, sources: Sequence[Sequence[Unfinished]]
    ) -> tuple[Candidate, ...]:
        """`sources`: what each engine of the present layout has."""
        others = self._others(pool, present)
        return tuple(self._candidate(pool, present, degree, sources) for degree in others)

    def _others(self, pool: Pool, present: int) -> list[int]:
        above = present if not self.lower else 0
        return sorted(degree for degree in pool.engines if degree > above and degree != present)

    def _candidate(
        self, pool: Pool, present: int, degree: int, sources: Sequence[Sequence[Unfinished]]
    ) -> Candidate:
        requests = [request for batch in sources for request in batch]
        targets = longest_first(requests, _context_tokens, len(pool.engines[degree]))
        switch = self.costs.cost(present, degree, _contexts(sources), _contexts(targets))
        courses = [self._course(degree, batch) for batch in targets if batch]
        further_s = math.inf if self.lower else self._later_s(pool, degree, courses)
        return Candidate(degree, min(_finish_s(courses), further_s), switch)

    def _course(self, tp_degree: int, batch: Sequence[Unfinished]) -> BatchForecast:
        most = self.max_num_seqs[tp_degree]
        return forecast(self.latency, tp_degree, batch, max_num_seqs=most)

    def _batches(self, engines: Sequence[EngineView]) -> list[list[Unfinished]]:
        """What each engine has."""
        progress = _progress(engines)
        remaining = self.remaining.tokens({id: num for id, (num, _) in progress.items()})
        batches: list[list[Unfinished]] = [[] for _ in engines]
        for id, (num_tokens, place) in progress.items():
            request = self._unfinished(engines[place], id, num_tokens, remaining[id])
            batches[place].append(request)
        return batches

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
        if not comparison.pays:
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


def _context_tokens(request: Unfinished) -> float:
    return request.context_tokens


def _progress(engines: Sequence[EngineView]) -> dict[RequestId, tuple[int, int]]:
    """(response tokens, which of these engines) of all their requests."""
    progress: dict[RequestId, tuple[int, int]] = {}
    for place, engine in enumerate(engines):
        for id, num_tokens in engine.progress.items():
            if id not in progress or num_tokens > progress[id][0]:
                progress[id] = num_tokens, place
    return progress


def _finish_s(courses: Iterable[BatchForecast]) -> float:
    """Until the slowest has finished."""
    return max(course.finish_s for course in courses)


def _contexts(batches: Iterable[Sequence[Unfinished]]) -> list[list[float]]:
    return [[request.context_tokens for request in batch] for batch in batches]
