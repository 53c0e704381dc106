"""Predicts the effects of moves on a generation stage. Pure.

    Race      another engine gets a copy and computes its keys and values, as on another node
    Migrate   another engine gets the request and computes its keys and values
    Defer     the request leaves the step
    Reshape   the pool's requests are dealt anew over the engines of another layout, once their keys
              and values are saved ahead; requests that end before then are gone

An impossible move has no effect. The moves weighed together with it are then impossible too.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.balance import in_turn, longest_first, places_after
from engines.control.state import (
    EngineForecast,
    EngineState,
    PlacedRequest,
    StepState,
    Times,
    first_s,
    merge,
)
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCosts, rms_tokens
from engines.rollout.moves import Defer, Migrate, Race, Reshape
from schemas.layout import Pool
from schemas.rollout import RequestId

WeighedMove = Race | Migrate | Defer | Reshape
"""Moves that a controller weighs: they decide where requests run. `Redraft` decides how to draft
and is made elsewhere."""
Changes = dict[int, EngineState | None]


@dataclass(frozen=True)
class Effect:
    """The predicted effect of some moves."""

    engines: frozenset[int]
    """Engines whose requests change or end at another time."""
    requests: frozenset[int]
    """Rows of the requests that may end at another time."""
    changes: Changes
    """Engines after the moves. None: the engine stops working."""
    times_s: Mapping[int, Times]
    """End of each copy on the changed engines."""
    ends_s: Times
    """End of each touched request. Requests that leave the step are missing."""

    def after(self, state: StepState) -> StepState:
        """Return the state after the moves. What they touch must not have changed since."""
        kept = [index for index in state.engines if index not in self.changes]
        engines = {index: state.engines[index] for index in kept}
        engines |= {index: engine for index, engine in self.changes.items() if engine}
        ends_s, holders = dict(state.ends_s), dict(state.holders)
        for row in self.requests:
            ends_s.pop(row)
            elsewhere = (i for i in holders.pop(row) if i not in self.changes)
            now = (*elsewhere, *(i for i, times_s in self.times_s.items() if row in times_s))
            if now:
                ends_s[row], holders[row] = self.ends_s[row], now
        times_s = {**{index: state.times_s[index] for index in kept}, **self.times_s}
        return StepState(state.forecaster, state.rows, engines, times_s, ends_s, holders)


@dataclass(frozen=True, slots=True)
class Switched:
    """A pool after a switch to another layout."""

    sources: list[EngineState]
    """Engines of the old layout at the moment of the switch."""
    targets: list[EngineState]
    """Engines of the new layout."""
    ready_s: float
    """Seconds from now until the targets decode."""
    move_kv: bool


@dataclass(frozen=True)
class Effects:
    """Predicted effects of moves in one generation stage."""

    latency: Latency
    pools: Mapping[int, Pool] = field(default_factory=dict)
    """Pools by index."""
    costs: SwitchCosts | None = None
    """Costs of switching a pool's layout. None without pools."""
    acceptances: Mapping[str, float] = field(default_factory=dict)
    """Acceptance by drafter, for a request that gets another drafter."""

    def of(self, state: StepState, moves: Iterable[WeighedMove]) -> Effect | None:
        """Return the effect of all moves, or None if one of them is impossible."""
        changes: Changes = {}
        for move in moves:
            draft = _Draft(state, changes)
            match move:
                case Race():
                    found = self._race(draft, move)
                case Migrate():
                    found = self._migrate(draft, move)
                case Defer():
                    found = self._defer(draft, move)
                case Reshape():
                    found = self._reshape(draft, move)
            if found is None:
                return None
            changes |= found
        return _effect(state, changes)

    def _race(self, draft: "_Draft", move: Race) -> Changes | None:
        found, target = draft.best(move.id), draft.engine(move.to_engine)
        if found is None or target is None or target.find(draft.row(move.id)):
            return None
        # Rounded to two digits, so that lookups hit the cache.
        acceptance = round(self.acceptances.get(move.drafting.drafter, 0.0), 2)
        copy = found[1]._replace(drafting=move.drafting, acceptance=acceptance)
        return {target.engine: self._join(target, [copy])}

    def _migrate(self, draft: "_Draft", move: Migrate) -> Changes | None:
        found, target = draft.best(move.id), draft.engine(move.to_engine)
        left = self._defer(draft, Defer(move.id, move.to_engine))
        if not (left and found and target) or target.find(draft.row(move.id)):
            return None
        return {**left, target.engine: self._join(target, [found[1]])}

    def _defer(self, draft: "_Draft", move: Defer) -> Changes | None:
        found = draft.best(move.id)
        if found is None or len(draft.state.holders[draft.row(move.id)]) > 1:
            return None
        origin = found[0]
        copies = tuple(copy for copy in origin.copies if copy.id != move.id)
        return {origin.engine: replace(origin, copies=copies)}

    def _reshape(self, draft: "_Draft", move: Reshape) -> Changes | None:
        pool = self.pools[move.pool]
        present = working(pool, draft.state)
        if present is None or present[0].tp_degree == move.tp_degree:
            return None
        sources = [engine for e in present if (engine := draft.engine(e.engine))]
        forecasts = [draft.state.forecast(source) for source in sources]
        made = self.switched(forecasts, pool, move.tp_degree, move.move_kv)
        if made is None:
            return None
        changes: Changes = {source.engine: None for source in sources}
        changes |= {t.engine: replace(t, delay_s=made.ready_s) for t in made.targets}
        return changes

    def switches(
        self, forecasts: Sequence[EngineForecast], pool: Pool, tp_degree: int, wait_s: float = 0.0
    ) -> list[Switched]:
        """Return the useful ways to switch, `wait_s` from now: move keys and values, or recompute
        them. Recomputing is left out unless it is ready sooner: while keys and values are saved,
        requests end."""
        assert self.costs is not None, "pools come with the costs of switching"
        ways = (self.switched(forecasts, pool, tp_degree, kv, wait_s) for kv in self.costs.ways)
        found = [made for made in ways if made]
        first_s = found[0].ready_s if found else 0.0
        return [made for made in found if made is found[0] or made.ready_s < first_s]

    def switched(
        self,
        forecasts: Sequence[EngineForecast],
        pool: Pool,
        tp_degree: int,
        move_kv: bool,
        wait_s: float = 0.0,
    ) -> Switched | None:
        """Return the pool after a switch that is decided `wait_s` from now. None if no request is
        left.

        To move keys and values, the engines first save those that exist when the switch is decided.
        The requests go on meanwhile. Then the switch is made.
        """
        assert self.costs is not None, "pools come with the costs of switching"
        sources = [forecast.later(wait_s) if wait_s else forecast.engine for forecast in forecasts]
        ahead_s = self.costs.ahead_s(sources[0].tp_degree, _contexts(sources)) if move_kv else 0.0
        since = 0.0
        if ahead_s:
            wait_s, decided = wait_s + ahead_s, sources
            sources = [forecast.later(wait_s) for forecast in forecasts]
            since = _since(decided, sources)
        targets = deal(merge(sources), pool.engines[tp_degree], tp_degree)
        if not any(target.copies for target in targets):
            return None
        contexts = _contexts(targets)
        if move_kv:
            moved = (sources[0].tp_degree, tp_degree, _contexts(sources), contexts, since)
            state_s = self.costs.move_s(*moved)
        else:
            state_s = self.costs.recompute_s(tp_degree, contexts)
        return Switched(sources, targets, wait_s + (self.costs.control_s + state_s), move_kv)

    def _join(self, target: EngineState, copies: Sequence[PlacedRequest]) -> EngineState:
        """Return the engine with the copies. All its requests wait while it prefills the copies."""
        rms = rms_tokens([copy.context_tokens for copy in copies])
        prefill_s = self.latency.prefill_s(target.tp_degree, len(copies), rms)
        delay_s = target.delay_s + prefill_s
        return replace(target, copies=(*target.copies, *copies), delay_s=delay_s)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A state with the changes of earlier moves."""

    state: StepState
    changes: Changes

    def engine(self, index: int) -> EngineState | None:
        return self.changes.get(index, self.state.engines.get(index))

    def row(self, id: RequestId) -> int:
        return self.state.rows.get(id, -1)

    def best(self, id: RequestId) -> tuple[EngineState, PlacedRequest] | None:
        """Return the engine with most tokens of the request, and the request there. The coordinator
        picks the same engine. Both include the changes so far."""
        row = self.row(id)
        holders = (self.state.engines[index] for index in self.state.holders.get(row, ()))
        found = [(engine.engine, copy) for engine in holders if (copy := engine.find(row))]
        most = max(found, key=lambda at: at[1].context_tokens, default=None)
        engine = self.engine(most[0]) if most else None
        copy = engine.find(row) if engine else None
        return (engine, copy) if engine and copy else None


def working(pool: Pool, state: StepState) -> list[EngineState] | None:
    """Return the engines of the pool's present layout. None unless all are in this stage and one
    has a request."""
    for engines in pool.engines.values():
        if all(index in state.engines for index in engines):
            present = [state.engines[index] for index in engines]
            return present if any(engine.copies for engine in present) else None
    return None


def deal(
    copies: Sequence[PlacedRequest], engines: Sequence[int], tp_degree: int
) -> list[EngineState]:
    """Deal requests over engines by context tokens, as the coordinator does."""
    shares = longest_first(copies, lambda copy: copy.context_tokens, len(engines))
    return [
        EngineState(index, tp_degree, tuple(share))
        for index, share in zip(engines, shares, strict=True)
    ]


def deal_anew(
    present: Sequence[EngineState], engines: Sequence[int], tp_degree: int
) -> list[EngineState]:
    """Deal requests that have not begun, as the coordinator does before a stage begins."""
    shares: list[list[PlacedRequest]] = [[] for _ in engines]
    for place, engine in enumerate(present):
        share_of = in_turn([shares[i] for i in places_after(place, len(present), len(engines))])
        for copy in engine.copies:
            share_of(copy.id.prompt_key).append(copy)
    return [
        EngineState(index, tp_degree, tuple(share))
        for index, share in zip(engines, shares, strict=True)
    ]


def _contexts(engines: Sequence[EngineState]) -> list[list[float]]:
    return [[copy.context_tokens for copy in engine.copies] for engine in engines]


def _since(before: Sequence[EngineState], after: Sequence[EngineState]) -> float:
    """Return the most tokens that one engine has added, for requests that it still has."""
    return max(
        new.context_tokens - sum(c.context_tokens for c in old.copies if c.row in left)
        for old, new in zip(before, after, strict=True)
        for left in [{copy.row for copy in new.copies}]
    )


def _effect(state: StepState, changes: Changes) -> Effect:
    times_s = {i: state.forecaster.times_s(engine) for i, engine in changes.items() if engine}
    before = (state.times_s[index] for index in changes if index in state.times_s)
    rows = frozenset(row for of_engine in (*before, *times_s.values()) for row in of_engine)
    holders = {index for row in rows for index in state.holders[row]}
    elsewhere = (_only(state.times_s[index], rows) for index in holders - changes.keys())
    return Effect(
        engines=frozenset(changes.keys() | holders),
        requests=rows,
        changes=changes,
        times_s=times_s,
        ends_s=first_s((*times_s.values(), *elsewhere)),
    )


def _only(times_s: Times, rows: frozenset[int]) -> Times:
    return {row: end_s for row, end_s in times_s.items() if row in rows}
