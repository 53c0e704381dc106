"""One question for each pool: would another layout end the stage sooner, its cost included? Pure.

    view ─outlook─► forecast in three scenarios of the lengths ─reshaping─► the switches that pay

A switch must pay in the main scenario, be better now than later, and pay on average over all three.
Races and migrations have rules of their own (`engines.control.techniques`). To weigh them against
switches as well brought nothing in simulation (docs/decisions/2-one-controller.md).

With `shares_engines`, free engines race the requests of other engines. Only a pool that may be the
last of the stage is then switched. For this the controller keeps the last forecast of every pool.

Rounds are rare. One starts when engines have become free, when enough requests have finished, or
after `every_s` seconds. `max_requests` bounds the requests that one call looks at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from refrain.engines.control.outlook import Outlook
from refrain.engines.control.reshaping import Reshaping
from refrain.engines.control.state import StepState
from refrain.engines.rollout.moves import EngineView, Reshape, RolloutView
from refrain.schemas.layout import Pool

MARGIN = 0.02
"""Least gain, as a share of the pool's forecast. Forecasts are no better."""
SCENARIOS = (1 / 3, 2 / 3)
"""Further ways to assign lengths to requests (`engines.pat.remaining`)."""
NEAR = 0.1
"""Share of the time to the stage's end. A pool whose forecast is this close to the end may still be
the last. Forecasts from history are about this far off: 6 to 17 % in PAT's setting."""
FINISHED_SHARE = 1 / 16
"""Share of the last round's requests that must finish before the next round starts."""


@dataclass
class Controller:
    """The controller of one generation stage."""

    reshaping: Reshaping
    outlook: Outlook
    margin: float = MARGIN
    every_s: float = 5.0
    """Longest time between two rounds."""
    max_batch: int = 128
    """The controller skips pools that have an engine with more requests: nothing to gain yet."""
    max_requests: float = 192
    """Most requests that one call looks at (at least one pool). A larger round takes several."""
    opens: bool = False
    """Whether a stage may begin in another layout."""
    shares_engines: bool = False
    """Whether an engine that becomes free can help the requests of other engines."""
    _todo: list[int] = field(default_factory=list)
    """Pools that this round has yet to look at."""
    _ends_s: dict[int, float] = field(default_factory=dict)
    """Last forecast of when each pool runs out of requests."""
    _since_s: float = -math.inf
    """When the last round began."""
    _num_looked_at: float = math.inf
    """Number of requests when the last round began, copies included."""
    _free: frozenset[int] = frozenset()

    def begin(self, view: RolloutView) -> Sequence[Reshape]:
        """Return the layouts that the stage begins in. Empty while no lengths are known."""
        if not (self.opens and self.outlook.remaining.is_known):
            return []
        states = [self.outlook.forecast(view, scenario) for scenario in (0.0, *SCENARIOS)]
        tp_degree = self.reshaping.opening(states)
        return [Reshape(pool, tp_degree) for pool in self.reshaping.pools if tp_degree]

    def decide(self, view: RolloutView) -> Sequence[Reshape]:
        """Return the switches that pay now."""
        if self._due(view):
            # Pools that the last round has not looked at come first.
            self._todo += [pool for pool in self.reshaping.pools if pool not in self._todo]
        pools, seen = self._next_pools(view)
        if not pools:
            return []
        seen_view = replace(view, engines=tuple(seen))
        state = self.outlook.forecast(seen_view)
        looks = [look for pool in pools if (look := self.reshaping.look(pool, state))]
        self._ends_s |= {look.pool.index: view.elapsed_s + max(look.ends_s) for look in looks}
        moves = [
            Reshape(look.pool.index, made.tp_degree, made.move_kv)
            for look in looks
            for value, made in look.best()
            if look.stays - value > self.margin * look.stays
        ]
        if not moves or not self.outlook.remaining.is_known:
            return moves
        others = [self.outlook.forecast(seen_view, scenario) for scenario in SCENARIOS]
        last_s = max(self._ends_s.get(i, math.inf) for i in self.reshaping.pools) - view.elapsed_s
        return [move for move in moves if self._pays_in_all(move, [state, *others], last_s)]

    def _pays_in_all(self, move: Reshape, states: Sequence[StepState], last_s: float) -> bool:
        """Return whether the switch pays on average over the scenarios. If free engines race, its
        pool must also end near `last_s` in one of them."""
        pool = self.reshaping.pools[move.pool]
        looks = [look for state in states if (look := self.reshaping.look(pool, state))]
        if self.shares_engines and max(max(one.ends_s) for one in looks) < (1 - NEAR) * last_s:
            return False
        return fmean(look.gain(move.tp_degree, move_kv=move.move_kv) for look in looks) > 0.0

    def _next_pools(self, view: RolloutView) -> tuple[list[Pool], list[EngineView]]:
        """Take the round's next pools, as many as `max_requests` allows. Return them and their
        engines."""
        there = {engine.engine: engine for engine in view.engines}
        pools: list[Pool] = []
        engines: list[EngineView] = []
        num = 0
        while self._todo:
            pool = self.reshaping.pools[self._todo[0]]
            own = [there[i] for of in pool.engines.values() for i in of if i in there]
            sizes = [len(engine.progress) for engine in own]
            if any(sizes) and max(sizes) <= self.max_batch:
                num += sum(sizes)
                if pools and num > self.max_requests:
                    break
                pools.append(pool)
                engines += own
            elif not any(sizes):
                self._ends_s[pool.index] = 0.0
            del self._todo[0]
        return pools, engines

    def _due(self, view: RolloutView) -> bool:
        free = frozenset(engine.engine for engine in view.engines if not engine.progress)
        num = sum(len(engine.progress) for engine in view.engines)
        due = (
            not free <= self._free
            or num <= self._num_looked_at * (1 - FINISHED_SHARE)
            or view.elapsed_s - self._since_s >= self.every_s
        )
        if due:
            self._free, self._num_looked_at, self._since_s = free, num, view.elapsed_s
        return due
