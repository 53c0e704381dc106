"""Effects that moves would have on a generation stage. Pure.

    Race      one copy more, which computes its keys and values first
    Migrate   the copy goes to another engine, and computes them there
    Defer     it leaves the step
    Reshape   the pool's requests, merged, go to the engines of the other layout, dealt anew

A move that is not possible has no effect, and spoils those that were weighed with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.balance import in_turn, longest_first, places_after
from engines.control.state import EngineState, PlacedRequest, StepState, Times, first_s, merge
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCost, SwitchCosts, rms_tokens
from engines.rollout.moves import Defer, Migrate, Race, Reshape
from schemas.layout import Pool
from schemas.rollout import RequestId

WeighedMove = Race | Migrate | Defer | Reshape
"""Moves that a controller weighs: who is where. How to draft is decided beside it."""
Changes = dict[int, EngineState | None]


@dataclass(frozen=True)
class Effect:
    """The effect of some moves on a state."""

    engines: frozenset[int]
    """Engines that would have something else to do, or would take another time for it."""
    requests: frozenset[int]
    """Requests that may end at another time, by row."""
    changes: Changes
    """Engines as they would be; None: not at work any more."""
    times_s: Mapping[int, Times]
    """When each copy on those would end."""
    ends_s: Times
    """When each of the requests would; those that leave the step are not there."""

    def after(self, state: StepState) -> StepState:
        """The state with it. What it touches must be as it was when it was weighed."""
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


@dataclass(frozen=True)
class Effects:
    """Predicts the effects of moves in one generation stage."""

    latency: Latency
    pools: Mapping[int, Pool] = field(default_factory=dict)
    """Pools by their index."""
    costs: SwitchCosts | None = None
    """Costs of switches between the layouts of a pool; None where there are none."""
    acceptances: Mapping[str, float] = field(default_factory=dict)
    """Acceptance by drafter, for requests that do not have it yet."""

    def of(self, state: StepState, moves: Iterable[WeighedMove]) -> Effect | None:
        """None: one of them is not possible."""
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
        # To two digits: there are few to look up.
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
        targets = deal(merge(sources), pool.engines[move.tp_degree], move.tp_degree)
        cost = self.switch_cost(sources, targets, move.move_kv)
        changes: Changes = {source.engine: None for source in sources}
        changes |= {t.engine: replace(t, delay_s=cost.seconds) for t in targets}
        return changes

    def switch_cost(
        self,
        sources: Sequence[EngineState],
        targets: Sequence[EngineState],
        move_kv: bool | None = None,
    ) -> SwitchCost:
        """`move_kv`: None leaves it to the costs."""
        assert self.costs is not None, "pools come with the costs of switching"
        costs = self.costs
        if move_kv is not None:
            costs = replace(costs, kv="move" if move_kv else "recompute")
        contexts = ([[c.context_tokens for c in e.copies] for e in es] for es in (sources, targets))
        return costs.cost(sources[0].tp_degree, targets[0].tp_degree, *contexts)

    def _join(self, target: EngineState, copies: Sequence[PlacedRequest]) -> EngineState:
        """Their keys and values are computed first, and everybody there waits for that."""
        rms = rms_tokens([copy.context_tokens for copy in copies])
        prefill_s = self.latency.prefill_s(target.tp_degree, len(copies), rms)
        delay_s = target.delay_s + prefill_s
        return replace(target, copies=(*target.copies, *copies), delay_s=delay_s)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A state with the changes so far."""

    state: StepState
    changes: Changes

    def engine(self, index: int) -> EngineState | None:
        return self.changes.get(index, self.state.engines.get(index))

    def row(self, id: RequestId) -> int:
        return self.state.rows.get(id, -1)

    def best(self, id: RequestId) -> tuple[EngineState, PlacedRequest] | None:
        """The engine that has most of the request, as the coordinator takes it from there, and the
        request, as they are by now."""
        row = self.row(id)
        holders = (self.state.engines[index] for index in self.state.holders.get(row, ()))
        found = [(engine.engine, copy) for engine in holders if (copy := engine.find(row))]
        most = max(found, key=lambda at: at[1].context_tokens, default=None)
        engine = self.engine(most[0]) if most else None
        copy = engine.find(row) if engine else None
        return (engine, copy) if engine and copy else None


def working(pool: Pool, state: StepState) -> list[EngineState] | None:
    """The engines of the pool's present layout, if all of them are at this phase and have
    something to do."""
    for engines in pool.engines.values():
        if all(index in state.engines for index in engines):
            present = [state.engines[index] for index in engines]
            return present if any(engine.copies for engine in present) else None
    return None


def deal(
    copies: Sequence[PlacedRequest], engines: Sequence[int], tp_degree: int
) -> list[EngineState]:
    """Requests dealt over engines by context tokens, as the coordinator deals them."""
    shares = longest_first(copies, lambda copy: copy.context_tokens, len(engines))
    return [
        EngineState(index, tp_degree, tuple(share))
        for index, share in zip(engines, shares, strict=True)
    ]


def deal_anew(
    present: Sequence[EngineState], engines: Sequence[int], tp_degree: int
) -> list[EngineState]:
    """Requests that have not begun, as the coordinator deals them where a stage is to begin."""
    shares: list[list[PlacedRequest]] = [[] for _ in engines]
    for place, engine in enumerate(present):
        share_of = in_turn([shares[i] for i in places_after(place, len(present), len(engines))])
        for copy in engine.copies:
            share_of(copy.id.prompt_key).append(copy)
    return [
        EngineState(index, tp_degree, tuple(share))
        for index, share in zip(engines, shares, strict=True)
    ]


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
