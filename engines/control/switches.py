"""Predicts a pool after a switch to another layout. Pure.

    engines now ─save keys and values ahead─► engines then ─merge, deal─► engines of the new layout

Requests that end while keys and values are saved are gone when the switch is made. Of a raced
request, the copy with most tokens counts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from refrain.engines.balance import in_turn, longest_first, places_after
from refrain.engines.control.state import (
    EngineForecast,
    EngineState,
    PlacedRequest,
    StepState,
    merge,
)
from refrain.engines.pat.costs import SwitchCosts
from refrain.schemas.layout import Pool


@dataclass(frozen=True, slots=True)
class Switched:
    """A pool after a switch to another layout."""

    sources: Sequence[EngineState]
    """Engines of the old layout at the moment of the switch."""
    targets: Sequence[EngineState]
    """Engines of the new layout."""
    ready_s: float
    """Seconds from now until the targets decode."""
    move_kv: bool
    """Whether keys and values move along. Otherwise the targets compute them again."""

    @property
    def tp_degree(self) -> int:
        return self.targets[0].tp_degree


def switches(
    costs: SwitchCosts,
    forecasts: Sequence[EngineForecast],
    pool: Pool,
    tp_degree: int,
    wait_s: float = 0.0,
) -> Iterator[Switched]:
    """Yield the useful ways to switch, `wait_s` from now: move keys and values, or recompute them.
    Recomputing is left out unless it is ready sooner: while keys and values are saved, requests
    end."""
    first_s = None
    for move_kv in costs.ways:
        made = switched(costs, forecasts, pool, tp_degree, move_kv, wait_s)
        if made and (first_s is None or made.ready_s < first_s):
            first_s = made.ready_s
            yield made


def switched(
    costs: SwitchCosts,
    forecasts: Sequence[EngineForecast],
    pool: Pool,
    tp_degree: int,
    move_kv: bool,
    wait_s: float = 0.0,
) -> Switched | None:
    """Return the pool after a switch that is decided `wait_s` from now. None if no request is left.

    To move keys and values, the engines first save those that exist when the switch is decided. The
    requests go on meanwhile. Then the switch is made.
    """
    sources = [forecast.later(wait_s) if wait_s else forecast.engine for forecast in forecasts]
    from_tp, since = sources[0].tp_degree, 0.0
    if move_kv and (ahead_s := costs.ahead_s(from_tp, _contexts(sources))):
        wait_s, decided = wait_s + ahead_s, sources
        sources = [forecast.later(wait_s) for forecast in forecasts]
        since = _since(decided, sources)
    targets = deal(merge(sources), pool.engines[tp_degree], tp_degree)
    if not any(target.copies for target in targets):
        return None
    contexts = _contexts(targets)
    if move_kv:
        kv_s = costs.move_s(from_tp, tp_degree, _contexts(sources), contexts, since)
    else:
        kv_s = costs.recompute_s(tp_degree, contexts)
    return Switched(sources, targets, wait_s + (costs.control_s + kv_s), move_kv)


def working(pool: Pool, state: StepState) -> list[EngineState] | None:
    """Return the engines of the pool's present layout. None unless all are in this stage and one
    has a request."""
    for engines in pool.engines.values():
        if all(index in state.forecasts for index in engines):
            present = [state.forecasts[index].engine for index in engines]
            return present if any(engine.copies for engine in present) else None
    return None


def deal(
    copies: Sequence[PlacedRequest], engines: Sequence[int], tp_degree: int
) -> list[EngineState]:
    """Deal requests over engines by context tokens, as the coordinator does."""
    shares = longest_first(copies, lambda copy: copy.context_tokens, len(engines))
    return _with(engines, tp_degree, shares)


def deal_anew(
    present: Sequence[EngineState], engines: Sequence[int], tp_degree: int
) -> list[EngineState]:
    """Deal requests that have not begun, as the coordinator does before a stage begins."""
    shares: list[list[PlacedRequest]] = [[] for _ in engines]
    for place, engine in enumerate(present):
        share_of = in_turn([shares[i] for i in places_after(place, len(present), len(engines))])
        for copy in engine.copies:
            share_of(copy.id.prompt_key).append(copy)
    return _with(engines, tp_degree, shares)


def _with(
    engines: Sequence[int], tp_degree: int, shares: Sequence[Sequence[PlacedRequest]]
) -> list[EngineState]:
    pairs = zip(engines, shares, strict=True)
    return [EngineState(index, tp_degree, tuple(share)) for index, share in pairs]


def _contexts(engines: Sequence[EngineState]) -> list[list[float]]:
    return [[copy.context_tokens for copy in engine.copies] for engine in engines]


def _since(before: Sequence[EngineState], after: Sequence[EngineState]) -> float:
    """Return the most tokens that one engine has added, for requests that it still has."""
    return max(
        new.context_tokens - sum(c.context_tokens for c in old.copies if c.row in left)
        for old, new in zip(before, after, strict=True)
        for left in [{copy.row for copy in new.copies}]
    )
