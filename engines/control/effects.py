"""What moves would do to a rollout phase. Pure.

    Redraft   the copy there is drafted for differently
    Race      one copy more, which computes its keys and values first
    Migrate   the copy goes to another engine, and computes them there
    Defer     it leaves the step
    Reshape   the pool's requests, merged, go to the engines of the other layout, dealt anew

A move that is not possible has no effect, and spoils those that were weighed with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from engines.control.state import Copy, EngineState, StepState, best_copy, merge
from engines.latency.interface import Latency
from engines.pat.costs import SwitchCost, SwitchCosts, rms_tokens
from engines.rollout.moves import Defer, Migrate, Move, Race, Redraft, Reshape
from schemas.layout import Pool
from schemas.rollout import RequestId

Changes = dict[int, EngineState | None]


@dataclass(frozen=True)
class Effect:
    """Of some moves, upon a state."""

    after: StepState
    engines: frozenset[int]
    """That would have something else to do, or have it for another time."""
    requests: frozenset[RequestId]
    """That would end at another time, it may be."""


@dataclass(frozen=True)
class Effects:
    """Of moves in one rollout phase."""

    latency: Latency
    pools: Mapping[int, Pool] = field(default_factory=dict)
    """By index."""
    costs: SwitchCosts | None = None
    """Of switches between the layouts of a pool; None where there are none."""
    acceptances: Mapping[str, float] = field(default_factory=dict)
    """Of drafters that a request does not have yet."""

    def of(self, state: StepState, moves: Iterable[Move]) -> Effect | None:
        """None: one of them is not possible."""
        changes: Changes = {}
        for move in moves:
            found = self._change(_Draft(state, changes), move)
            if found is None:
                return None
            changes |= found
        return _effect(state, changes)

    def _change(self, draft: "_Draft", move: Move) -> Changes | None:
        match move:
            case Redraft():
                return self._redraft(draft, move)
            case Race():
                return self._race(draft, move)
            case Migrate():
                return self._migrate(draft, move)
            case Defer():
                return self._defer(draft, move)
            case Reshape():
                return self._reshape(draft, move)

    def _redraft(self, draft: "_Draft", move: Redraft) -> Changes | None:
        engine = draft.engine(move.engine)
        copy = engine.find(move.id) if engine else None
        if engine is None or copy is None:
            return None
        known = copy.drafting and copy.drafting.drafter == move.drafting.drafter
        acceptance = copy.acceptance if known else self._expected(move.drafting.drafter)
        changed = replace(copy, drafting=move.drafting, acceptance=acceptance)
        copies = tuple(changed if other is copy else other for other in engine.copies)
        return {engine.engine: replace(engine, copies=copies)}

    def _race(self, draft: "_Draft", move: Race) -> Changes | None:
        origin, target = draft.best(move.id), draft.engine(move.to_engine)
        if origin is None or target is None or target.find(move.id):
            return None
        acceptance = self._expected(move.drafting.drafter)
        copy = replace(origin[1], drafting=move.drafting, acceptance=acceptance)
        return {target.engine: self._join(target, [copy])}

    def _migrate(self, draft: "_Draft", move: Migrate) -> Changes | None:
        target = draft.engine(move.to_engine)
        left = self._defer(draft, Defer(move.id, move.to_engine))
        if left is None or target is None or target.find(move.id):
            return None
        found = draft.best(move.id)
        assert found is not None
        return {**left, target.engine: self._join(target, [found[1]])}

    def _defer(self, draft: "_Draft", move: Defer) -> Changes | None:
        found = draft.best(move.id)
        if found is None or len(draft.state.holders[move.id]) > 1:
            return None
        origin = draft.engine(found[0])
        assert origin is not None
        copies = tuple(copy for copy in origin.copies if copy.id != move.id)
        return {origin.engine: replace(origin, copies=copies)}

    def _reshape(self, draft: "_Draft", move: Reshape) -> Changes | None:
        pool = self.pools[move.pool]
        sources = working(pool, draft.state)
        if sources is None or sources[0].tp_degree == move.tp_degree or draft.changes:
            return None
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

    def _join(self, target: EngineState, copies: Sequence[Copy]) -> EngineState:
        """Their keys and values are computed first, and everybody there waits for that."""
        rms = rms_tokens([copy.context_tokens for copy in copies])
        prefill_s = self.latency.prefill_s(target.tp_degree, len(copies), rms)
        delay_s = target.delay_s + prefill_s
        return replace(target, copies=(*target.copies, *copies), delay_s=delay_s)

    def _expected(self, drafter: str) -> float:
        return self.acceptances.get(drafter, 0.0)


@dataclass(frozen=True, slots=True)
class _Draft:
    """A state with the changes so far."""

    state: StepState
    changes: Changes

    def engine(self, index: int) -> EngineState | None:
        return self.changes.get(index, self.state.engines.get(index))

    def best(self, id: RequestId) -> tuple[int, Copy] | None:
        """Where it is, as it is by now."""
        found = best_copy(self.state, id)
        if found is None:
            return None
        engine = self.engine(found[0])
        copy = engine.find(id) if engine else None
        return (found[0], copy) if copy else None


def working(pool: Pool, state: StepState) -> list[EngineState] | None:
    """The engines of the pool's present layout, if all of them are at this phase and have
    something to do."""
    for engines in pool.engines.values():
        if all(index in state.engines for index in engines):
            present = [state.engines[index] for index in engines]
            return present if any(engine.copies for engine in present) else None
    return None


def deal(copies: Sequence[Copy], engines: Sequence[int], tp_degree: int) -> list[EngineState]:
    """The longest first, each to the engine with the fewest tokens to come."""
    shares: dict[int, list[Copy]] = {index: [] for index in engines}
    loads = dict.fromkeys(engines, 0.0)
    for copy in sorted(copies, key=lambda copy: -copy.remaining_tokens):
        index = min(loads, key=lambda i: (loads[i], i))
        shares[index].append(copy)
        loads[index] += copy.context_tokens
    return [EngineState(index, tp_degree, tuple(share)) for index, share in shares.items()]


def _effect(state: StepState, changes: Changes) -> Effect:
    after = state.after(changes)
    ids = {
        copy.id
        for engines in (state.engines, after.engines)
        for index in changes
        if index in engines
        for copy in engines[index].copies
    }
    holders = {index for id in ids for index in state.holders.get(id, ())}
    return Effect(after, frozenset(changes.keys() | holders), frozenset(ids))
