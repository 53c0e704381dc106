"""Responses that outgrow their ranking group leave its engines (RhymeRL, section 6.3). Pure.

    outlier of a short group ──Migrate──► an engine of a longer group, busy for longest
    outlier of a long group  ──Defer────► the next step, an engine of its longest group

An outlier is (1) "within the last remaining 10 % of the rollouts in the group" and (2) longer than
alpha times "the maximum historical response length of the prompts in the same group". Either kind
stands in where the other is impossible; where both are, the response stays.

Deviations: the paper does not say which groups are long (`defer_share`), nor where a response goes.
A small group's last response counts as its last 10 %, however small the group. A prompt without
history has outgrown nothing: its responses stay. No response moves twice.

A decision asks first how many requests each engine has, and looks at requests only when enough of
a ranking group has finished. Hence it may miss, for as long as it lasts, that a foreign request
came to an engine at the moment at which another ended; outliers then move later.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from engines.rollout.moves import Defer, EngineView, Migrate, Move, RolloutView
from schemas.rollout import RequestId
from schemas.step import PromptGroup, StepPlan

_ROUNDING = 1e-9


@dataclass(slots=True)
class _Seen:
    """An engine when its requests were last looked at."""

    view: EngineView | None = None
    num_requests: int = -1
    by_rank: dict[int, list[RequestId]] = field(default_factory=dict)
    num_foreign: int = 0
    """Requests of no ranking group that has this engine."""


@dataclass(slots=True)
class _Targets:
    """Engines of the step during one decision: [expected passes to go, requests] of each."""

    load: dict[int, list[float]]
    num_deferrable: int
    num_deferred: dict[int, int]
    """Requests deferred to each engine of the next step's longest group."""


class Migration:
    """Decides for one step. Remembers whom it moved, so that nobody moves twice."""

    def __init__(self, plan: StepPlan, *, last_share: float, defer_share: float) -> None:
        """`last_share`: of a ranking group's planned samples; 0 moves nothing. `defer_share`: of
        the ranking groups, rounded up; these, the longest, prefer to defer."""
        self._step, self._split = plan.step, plan.split
        self._groups = plan.ranking_groups
        self._engines = [frozenset(group.engines) for group in self._groups]
        self._rank_of_engine = {e: rank for rank, all in enumerate(self._engines) for e in all}
        self._rank_of_prompt = {
            group.prompt_key: group.ranking_group
            for group in plan.groups
            if group.ranking_group is not None
        }
        self._expected = {g.prompt_key: g.expected_tokens for g in plan.groups}
        self._passes_per_token = {g.prompt_key: _passes_per_token(g) for g in plan.groups}
        self._limits = [
            _limit(last_share, group.num_prompts * plan.group_size) for group in self._groups
        ]
        growth = plan.length_growth or 0.0
        self._thresholds = [growth * group.longest_tokens for group in self._groups]
        num_deferring = math.ceil(defer_share * len(self._groups) - _ROUNDING)
        self._first_deferring = len(self._groups) - num_deferring
        self._seen: dict[int, _Seen] = {}
        self._asked: dict[RequestId, int | None] = {}
        """Engine that each request was to leave; None once it has."""
        self._num_deferred = dict.fromkeys(self._groups[0].engines if self._groups else (), 0)

    def decide(self, view: RolloutView) -> Sequence[Move]:
        moves = self.propose(view)
        self.note(view, moves)
        return moves

    def propose(self, view: RolloutView) -> list[Migrate | Defer]:
        """Moves that are to be noted where they are made."""
        ranks = self._ending(view)
        if not ranks:
            return []
        for engine in view.engines:
            self._look(engine)
        outliers = [(rank, *found) for rank in ranks for found in self._outliers(view, rank)]
        if not outliers:
            return []
        targets = _Targets(self._loads(view), view.num_deferrable, dict(self._num_deferred))
        moves = (self._move(rank, id, engine, targets) for rank, id, engine in outliers)
        return [move for move in moves if move]

    def note(self, view: RolloutView, moves: Iterable[Move]) -> None:
        """Note that these moves are asked for."""
        for move in moves:
            assert isinstance(move, (Migrate, Defer))
            at = (engine.engine for engine in view.engines if move.id in engine.progress)
            self._asked[move.id] = next(at)
            if isinstance(move, Defer):
                self._num_deferred[move.to_engine] += 1

    def _ending(self, view: RolloutView) -> list[int]:
        """Ranking groups of which no more than the last share may be left, the longest first.

        A group has at least as many requests as are on its engines, without the foreign ones.
        """
        least = [0] * len(self._groups)
        for engine in view.engines:
            num = len(engine.progress)
            seen = self._seen.get(engine.engine)
            if seen is None or num > seen.num_requests:
                seen = self._look(engine)
            rank = self._rank_of_engine.get(engine.engine)
            if rank is not None:
                least[rank] += num - seen.num_foreign
        return [
            rank
            for rank in reversed(range(len(least)))
            if least[rank] <= self._limits[rank] and self._thresholds[rank] > 0
        ]

    def _look(self, engine: EngineView) -> _Seen:
        """Requests of an engine by ranking group, looked up again only where they have changed."""
        seen = self._seen.setdefault(engine.engine, _Seen())
        num = len(engine.progress)
        if seen.view is engine and seen.num_requests == num:
            return seen
        by_rank: dict[int, list[RequestId]] = {}
        for id in engine.progress:
            if (rank := self._rank(id)) is not None:
                by_rank.setdefault(rank, []).append(id)
        own = by_rank.get(self._rank_of_engine.get(engine.engine, -1), ())
        seen.view, seen.num_requests, seen.by_rank = engine, num, by_rank
        seen.num_foreign = num - len(own)
        return seen

    def _rank(self, id: RequestId) -> int | None:
        """Rank of a sample that this step planned; None for one that the step before left to it."""
        planned = id.sample_index >= 0 and id.step == self._step and id.split == self._split
        return self._rank_of_prompt.get(id.prompt_key) if planned else None

    def _outliers(self, view: RolloutView, rank: int) -> list[tuple[RequestId, int]]:
        """(request, its engine), the longest first."""
        by_engine = [
            (engine, self._seen[engine.engine].by_rank.get(rank)) for engine in view.engines
        ]
        if sum(len(ids) for _, ids in by_engine if ids) > self._limits[rank]:
            return []
        found = [
            (tokens, id, engine.engine)
            for engine, ids in by_engine
            for id in ids or ()
            if (tokens := engine.progress[id]) > self._thresholds[rank]
            and self._may_move(id, engine.engine)
        ]
        found.sort(key=lambda outlier: -outlier[0])
        return [(id, engine) for _, id, engine in found]

    def _may_move(self, id: RequestId, engine: int) -> bool:
        """Whether a request may move: not once it has left the engine that it was asked to leave;
        asked in vain, it may be again."""
        if self._asked.get(id, engine) != engine:
            self._asked[id] = None
        return self._expected[id.prompt_key] is not None and self._asked.get(id, engine) == engine

    def _move(
        self, rank: int, id: RequestId, engine: int, targets: _Targets
    ) -> Migrate | Defer | None:
        kinds = [self._migrate, self._defer]
        if rank >= self._first_deferring:
            kinds.reverse()
        for kind in kinds:
            if move := kind(rank, id, engine, targets):
                return move
        return None

    def _defer(self, rank: int, id: RequestId, engine: int, targets: _Targets) -> Defer | None:
        """Deferral to an engine of the shortest group, which has the longest one in the next
        step."""
        del rank, engine
        if targets.num_deferrable <= 0:
            return None
        targets.num_deferrable -= 1
        num_deferred = targets.num_deferred
        to_engine = min(num_deferred, key=lambda e: (num_deferred[e], e))
        num_deferred[to_engine] += 1
        return Defer(id, to_engine)

    def _migrate(self, rank: int, id: RequestId, engine: int, targets: _Targets) -> Migrate | None:
        """Migration to the engine of a longer group with the most passes to go, the least busy
        among equal ones."""
        longer = [
            other
            for other in targets.load
            if other != engine and self._rank_of_engine.get(other, -1) > rank
        ]
        if not longer:
            return None
        to_engine = min(longer, key=lambda e: (-targets.load[e][0], targets.load[e][1], e))
        targets.load[to_engine][1] += 1
        return Migrate(id, to_engine)

    def _loads(self, view: RolloutView) -> dict[int, list[float]]:
        """Load of each engine: the longest that one of its requests is expected to go on, in
        passes, and how many there are."""
        return {
            engine.engine: [max(self._to_go(engine), default=0.0), len(engine.progress)]
            for engine in view.engines
        }

    def _to_go(self, engine: EngineView) -> Iterator[float]:
        for rank, ids in self._seen[engine.engine].by_rank.items():
            group = self._groups[rank]
            typical = group.representative_tokens
            usual = _share(group.representative_passes, typical)
            for id in ids:
                tokens = (self._expected[id.prompt_key] or typical) - engine.progress[id]
                yield tokens * (self._passes_per_token[id.prompt_key] or usual)


def _passes_per_token(group: PromptGroup) -> float | None:
    """None where the prompt was never seen."""
    if group.expected_tokens is None:
        return None
    return _share(group.expected_passes, group.expected_tokens)


def _share(passes: float | None, tokens: float) -> float:
    """Passes of a token: 1 where drafts are not reckoned with."""
    return passes / tokens if passes and tokens else 1.0


def _limit(last_share: float, num_planned: int) -> int:
    """Unfinished samples that are the last of a group: last_share * num_planned, at least one."""
    return max(1, math.floor(last_share * num_planned + _ROUNDING)) if last_share else 0
