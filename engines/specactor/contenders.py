"""The unfinished requests of a stage, those that end last first (SpecActor, Algorithm 3). Pure.

    views of engines ──changed ones──► requests by engine, ranked ──merged──► as many as are read

A stage has thousands of requests, and a free engine takes a few. So an engine's requests are ranked
again only when its view has changed, and the ranks of all engines are merged lazily. Requests that
race are few: they are looked at anew each time, because they are on several engines.
"""

import heapq
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from refrain.engines.latency.expectation import expected_tokens
from refrain.engines.rollout.moves import EngineView, RolloutView
from refrain.engines.specactor.ladder import request_acceptance
from refrain.schemas.rollout import DraftProgress, RequestId

TokensToCome = Callable[[Mapping[RequestId, int]], Mapping[RequestId, float]]
"""Maps response tokens so far, by request, to the expected tokens to come."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An unfinished request."""

    id: RequestId
    acceptance: float | None
    """Probability that a draft token is accepted. None until something is verified."""
    drafters: frozenset[str]
    """Drafters that it has, or had, on any engine."""
    engines: frozenset[int]
    """Engines that it is on."""
    nodes: frozenset[str | None] = frozenset()
    """Nodes of these engines."""
    steps_to_come: float = 0.0
    """Expected verifications until it ends. 0 for all requests if no lengths are known."""


class Raced(NamedTuple):
    """The races of a request."""

    copies: Mapping[int, str] = {}
    """Drafter on each engine that it races on."""
    left: Collection[str | None] = ()
    """Drafters on the engines that it has left."""


class Rank(NamedTuple):
    """Place of a request: the smallest is the first."""

    minus_steps: float
    unknown: bool
    acceptance: float
    split: str
    step: int
    prompt_key: str
    sample_index: int
    id: RequestId


def rank(contender: Contender) -> Rank:
    """Return the place of a request. Ties go to the lower id."""
    return _rank(contender.id, contender.steps_to_come, contender.acceptance)


def _rank(id: RequestId, steps_to_come: float, acceptance: float | None) -> Rank:
    slowness = -steps_to_come, acceptance is None, acceptance or 0.0
    return Rank(*slowness, id.split, id.step, id.prompt_key, id.sample_index, id)


@dataclass(frozen=True, slots=True)
class _Ranked:
    """The requests of an engine."""

    view: EngineView
    ranks: Sequence[Rank]
    """Ascending."""
    drafters: Counter[str | None]
    """Number of requests by drafter."""


@dataclass(frozen=True)
class Order:
    """The requests of one moment, in order of their rank."""

    ranked: Sequence[Sequence[Rank]]
    """Requests of each engine, ascending."""
    several: Set[RequestId]
    """Requests that race or are on several engines. Their engines' own ranks do not count."""
    merged: Sequence[Contender]
    """These requests."""
    plain_drafters: Set[str | None]
    """Drafters of the other requests, which have one each."""
    contender: Callable[[RequestId], Contender]
    """Returns one of the other requests."""

    def lacked(self, drafters: Iterable[str]) -> set[str]:
        """Return those drafters that some request lacks."""
        return {
            drafter
            for drafter in drafters
            if self.plain_drafters - {drafter}
            or any(drafter not in one.drafters for one in self.merged)
        }

    def first(
        self, wanted: Set[str], among: Container[RequestId] | None = None
    ) -> Iterator[Contender]:
        """Yield the requests while one may lack a wanted drafter. `wanted` may shrink while they
        are read. `among`: the only requests to yield."""
        lacked = {drafter for drafter in wanted if self.plain_drafters - {drafter}}

        def is_lacked(_: Rank) -> bool:
            return not lacked.isdisjoint(wanted)

        several = {rank(one): one for one in self.merged}
        plain = [takewhile(is_lacked, ranks) for ranks in self.ranked]
        others = (place for place in heapq.merge(*plain) if place.id not in self.several)
        for place in heapq.merge(others, sorted(several)):
            if among is None or place.id in among:
                yield several.get(place) or self.contender(place.id)


class Contenders:
    """All requests of the last view."""

    def __init__(self, initial: str | None, to_come: TokensToCome | None) -> None:
        """`initial`: the drafter that requests have until an engine reports another. `to_come`:
        None if no lengths are known."""
        self._initial, self._to_come = initial, to_come
        self._views: dict[int, EngineView] = {}
        self._holders: dict[RequestId, set[int]] = {}
        self._shared: set[RequestId] = set()
        """Requests on several engines."""
        self._ranked: dict[int, _Ranked] = {}

    def update(self, view: RolloutView) -> None:
        """Take the engines that have changed."""
        views = {engine.engine: engine for engine in view.engines}
        for index in self._views.keys() - views.keys():
            self._hold(index, ())
            del self._views[index]
            self._ranked.pop(index, None)
        for index, engine in views.items():
            if self._views.get(index) is not engine:
                self._hold(index, engine.progress)
                self._views[index] = engine

    def __contains__(self, id: RequestId) -> bool:
        return id in self._holders

    def holders(self, id: RequestId) -> dict[int, EngineView]:
        """Return the engines that have the request."""
        return {index: self._views[index] for index in self._holders.get(id, ())}

    def drafter(self, engine: EngineView, id: RequestId) -> str | None:
        """Return the drafter that the request has on this engine. None: it has no drafts."""
        told = engine.drafting.get(id)
        if told is None:
            return self._initial
        return told.setting.drafter if told.setting else None

    def order(self, raced: Mapping[RequestId, Raced]) -> "Order":
        """Return the order of all requests. `raced`: those that race."""
        several = self._shared.union(id for id in raced if id in self._holders)
        ranked = self._all_ranked()
        return Order(
            [of.ranks for of in ranked],
            several,
            self._merged(several, raced),
            self._plain_drafters(ranked, several),
            lambda id: self._contender(id, Raced(), 0.0),
        )

    def _hold(self, index: int, ids: Collection[RequestId]) -> None:
        """Record that the engine has these requests and no others."""
        before = self._views[index].progress.keys() if index in self._views else set()
        for id in before - set(ids):
            self._holders[id].discard(index)
            if len(self._holders[id]) < 2:
                self._shared.discard(id)
            if not self._holders[id]:
                del self._holders[id]
        for id in ids:
            if id not in before:
                holders = self._holders.setdefault(id, set())
                holders.add(index)
                if len(holders) > 1:
                    self._shared.add(id)

    def _all_ranked(self) -> list[_Ranked]:
        """Return the requests of each engine, ranked by its present view."""
        for index, view in self._views.items():
            known = self._ranked.get(index)
            if known is None or known.view is not view:
                self._ranked[index] = self._rank_all(view)
        return list(self._ranked.values())

    def _rank_all(self, view: EngineView) -> _Ranked:
        told, to_come = view.drafting, self._tokens_to_come(view.progress)
        ranks = [
            _rank(id, num / _tokens_per_step(told.get(id)), request_acceptance(told.get(id)))
            for id, num in to_come.items()
        ]
        drafters = Counter(self.drafter(view, id) for id in view.progress)
        return _Ranked(view, sorted(ranks), drafters)

    def _tokens_to_come(self, generated: Mapping[RequestId, int]) -> Mapping[RequestId, float]:
        if self._to_come and generated:
            return self._to_come(generated)
        return dict.fromkeys(generated, 0.0)

    def _plain_drafters(
        self, ranked: Iterable[_Ranked], several: Set[RequestId]
    ) -> set[str | None]:
        """Return the drafters of the requests that are on one engine and do not race."""
        total: Counter[str | None] = Counter()
        for of in ranked:
            total.update(of.drafters)
        for id in several:
            total.subtract(self.drafter(view, id) for view in self.holders(id).values())
        return {drafter for drafter, num in total.items() if num > 0}

    def _merged(self, several: Set[RequestId], raced: Mapping[RequestId, Raced]) -> list[Contender]:
        """Return these requests, each with the tokens of its longest copy."""
        generated = {
            id: max(view.progress[id] for view in self.holders(id).values()) for id in several
        }
        to_come = self._tokens_to_come(generated)
        return [self._contender(id, raced.get(id, Raced()), to_come[id]) for id in several]

    def _contender(self, id: RequestId, raced: Raced, num_tokens: float) -> Contender:
        """Return a request. `num_tokens`: expected tokens to come."""
        holders = self.holders(id)
        told = [view.drafting.get(id) for view in holders.values()]
        acceptances = [a for p in told if (a := request_acceptance(p)) is not None]
        drafters = {
            raced.copies.get(index)
            if id not in view.drafting and index in raced.copies
            else self.drafter(view, id)
            for index, view in holders.items()
        }
        return Contender(
            id,
            max(acceptances, default=None),
            frozenset(
                d for d in drafters.union(raced.copies.values(), raced.left) if d is not None
            ),
            frozenset(holders),
            frozenset(view.node_id for view in holders.values()),
            num_tokens / max(map(_tokens_per_step, told)),
        )


def _tokens_per_step(told: DraftProgress | None) -> float:
    """Return expected tokens per verification. 1 while the acceptance is unknown."""
    acceptance = request_acceptance(told)
    if acceptance is None or told is None or told.setting is None:
        return 1.0
    return expected_tokens(told.setting.window, acceptance)
