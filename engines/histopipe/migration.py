"""Moves responses that outgrow their ranking group to other engines (RhymeRL, section 6.3). Pure.

    outlier of a short group ──Migrate──► the busiest engine of a longer group
    outlier of a long group  ──Defer────► the next step, on an engine of its longest group

An outlier is (1) "within the last remaining 10 % of the rollouts in the group" and (2) longer than
alpha times "the maximum historical response length of the prompts in the same group". When the
preferred kind of move is impossible, the other kind is made. When both are, the response stays.

Deviations: the paper does not say which groups are long (`defer_share`), nor where a response goes.
At least one response counts as a group's last 10 %, however small the group. A prompt without
history has no length to outgrow, so its responses stay. No response moves twice.

To save time, a decision first counts the requests of each engine. It looks at single requests only
when enough of a ranking group may have finished. If a request arrives at an engine just when
another one ends, the count stays the same and the arrival is missed. Outliers then move later.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from refrain.engines.rollout.moves import Defer, EngineView, Migrate, Move, RolloutView
from refrain.schemas.rollout import RequestId
from refrain.schemas.step import PromptGroup, StepPlan

_ROUNDING = 1e-9
DEFER_SHARE = 0.25
"""Share of the ranking groups, the longest ones, that defer outliers to the next step. The others
have longer groups to move them to. The paper gives no number."""


@dataclass(slots=True)
class _Seen:
    """An engine's requests when they were last looked at."""

    view: EngineView | None = None
    num_requests: int = -1
    by_rank: dict[int, list[RequestId]] = field(default_factory=dict)
    num_foreign: int = 0
    """Requests that belong to no ranking group on this engine."""


@dataclass(slots=True)
class _Targets:
    """Load of the engines during one decision: [expected passes to go, requests] of each."""

    load: dict[int, list[float]]
    num_deferrable: int
    num_deferred: dict[int, int]
    """Requests deferred to each engine of the next step's longest group."""


class Migration:
    """Moves the outliers of one step. It remembers moved requests, so that none moves twice."""

    def __init__(self, plan: StepPlan, *, last_share: float, defer_share: float) -> None:
        """Prepare the limits of each ranking group.

        `last_share`: share of a ranking group's planned samples that counts as its last ones; with
        0 nothing moves. `defer_share`: share of the ranking groups, the longest ones, that prefer
        to defer; rounded up.
        """
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
        """Engine that each moved request was to leave. None once it has left."""
        self._num_deferred = dict.fromkeys(self._groups[0].engines if self._groups else (), 0)

    def decide(self, view: RolloutView) -> Sequence[Move]:
        moves = self.propose(view)
        self.note(view, moves)
        return moves

    def propose(self, view: RolloutView) -> list[Migrate | Defer]:
        """Return moves. Call `note` for the moves that are made."""
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
        """Record that these moves are being made."""
        for move in moves:
            assert isinstance(move, (Migrate, Defer))
            at = (engine.engine for engine in view.engines if move.id in engine.progress)
            self._asked[move.id] = next(at)
            if isinstance(move, Defer):
                self._num_deferred[move.to_engine] += 1

    def _ending(self, view: RolloutView) -> list[int]:
        """Return the ranking groups that may be down to their last share, the longest first.

        The count is a lower bound: the requests on the group's engines, without foreign ones.
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
        """Sort an engine's requests by ranking group. Skip this if nothing has changed."""
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
        """Return the rank of a sample of this step, or None for one deferred from the last step."""
        planned = id.sample_index >= 0 and id.step == self._step and id.split == self._split
        return self._rank_of_prompt.get(id.prompt_key) if planned else None

    def _outliers(self, view: RolloutView, rank: int) -> list[tuple[RequestId, int]]:
        """Return (request, its engine) of each outlier, the longest first."""
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
        """Return whether a request may move: it has a history and has not moved before. If a move
        failed and the request is still on its engine, it may move again."""
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
        """Defer to an engine of the shortest group: it has the longest group in the next step."""
        del rank, engine
        if targets.num_deferrable <= 0:
            return None
        targets.num_deferrable -= 1
        num_deferred = targets.num_deferred
        to_engine = min(num_deferred, key=lambda e: (num_deferred[e], e))
        num_deferred[to_engine] += 1
        return Defer(id, to_engine)

    def _migrate(self, rank: int, id: RequestId, engine: int, targets: _Targets) -> Migrate | None:
        """Migrate to the longer group's engine with the most passes to go. In a tie, take the one
        with the fewest requests."""
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
        """Return [passes until the engine's longest request is expected to end, requests]."""
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
    """Return passes per token, or None for a prompt without history."""
    if group.expected_tokens is None:
        return None
    return _share(group.expected_passes, group.expected_tokens)


def _share(passes: float | None, tokens: float) -> float:
    """Return passes per token. 1 if drafts are not accounted for."""
    return passes / tokens if passes and tokens else 1.0


def _limit(last_share: float, num_planned: int) -> int:
    """Return how many unfinished samples are the last of a group: at least one."""
    return max(1, math.floor(last_share * num_planned + _ROUNDING)) if last_share else 0
