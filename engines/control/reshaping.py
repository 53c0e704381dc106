"""When a pool's GPUs would be better off in another layout, as proposals (PAT, Algorithm 1). Pure.

    T_cur    the slowest of the pool's engines, each with its own requests             (line 4)
    TP'      of every higher layout: all requests, dealt anew over its engines         (line 7)
             T_rem + T_switch, the slowest engine again                            (lines 8, 9)
    switch   to the least of these, if it is below T_cur                             (line 15)
             and going on for a while and switching then would be no better

The algorithm runs again after a switch, so that a stage may have several. Before a stage there is
nothing to be moved, and it begins in the layout, lower ones too, from which all this is predicted
to end the soonest, once what that would have saved so far is more than the change (`Forgone`).

Deviations:
- The paper weighs a switch now against none at all. That is enough where all responses are taken
  to run to the same end, as a higher TP degree then pays only once it decodes the present batch
  faster. Who knows of the tail would switch from the start, as a switch pays at any time before it:
  so it is weighed against later moments too (`wait_shares`; none gives the paper's rule).
- Each response has an estimate of its own (`engines.pat.remaining`); `Maximum` is the paper's.
- A stage may begin in any layout. In the paper it is in one that is tuned by hand.
- Then only higher TP degrees are looked at. A batch that shrinks has no use for a lower one; by
  lengths that are taken to be the maximum it may seem so, again and again.
- Nobody switches on a guess: no layout is left or taken whose course goes beyond what its latencies
  were measured at (`Forecaster.knows`).
- A switch that moves keys and values is made once those that are there when it is decided have
  been saved, while requests go on. It is weighed as it would be then.
- Requests are dealt as they are when the switch is made: the longest context first, each to the
  engine with the least. The paper says "merge and redistribute".
- A raced request counts once, where it has the most tokens.
- Another objective than the end of the step may be asked for (`engines.control.objective`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from engines.control.effects import Effects, Switched, deal_anew, working
from engines.control.objective import Objective, SoonestEnd
from engines.control.proposal import Proposal
from engines.control.state import Course, EngineState, StepState
from engines.rollout.moves import Move, Reshape, RolloutView
from schemas.layout import Pool

LATER_SHARE = 0.03
"""Share by which the forecast of a later switch must be better than that of none, where it is
decided in which layout a stage begins."""
WAIT_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)


@dataclass
class Forgone:
    """Savings of other layouts that were forgone, stage after stage since pools begin as they do.

    Stages differ: who follows each one's forecast pays for changes there and back, and who asks a
    change to pay in one stage never makes one that pays a little in all. Who changes once as much
    was forgone as a change costs has lost no more by the change than by waiting, whatever comes.
    """

    totals: dict[int, float] = field(default_factory=dict)
    """The objective that was forgone by TP degree, never below 0."""

    def add(self, present: int, of_stage: Mapping[int, float]) -> None:
        """Count a stage that may yet begin anywhere. `of_stage`: the objective by TP degree."""
        for degree, total in of_stage.items():
            gain = of_stage[present] - total
            self.totals[degree] = max(0.0, self.totals.get(degree, 0.0) + gain)


@dataclass
class Reshaping:
    """The best higher layout of each pool."""

    objective: Objective = field(default_factory=SoonestEnd)
    wait_shares: Sequence[float] = WAIT_SHARES
    """Later moments of a switch that are looked at, as shares of the time until the pool's end."""
    forgone: Forgone = field(default_factory=Forgone)
    """Savings forgone in the stages before; kept from stage to stage by who has the engines."""

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del view
        return [
            proposal
            for pool in effects.pools.values()
            if (sources := working(pool, state))
            for proposal in _PoolLook(self, pool, sources, state, effects).proposals()
        ]

    def note(self, proposal: Proposal) -> None:
        """There is nothing to remember."""

    def follow(self, view: RolloutView) -> Sequence[Move]:
        """Nothing follows."""
        del view
        return ()

    def opening(self, states: Sequence[StepState], effects: Effects) -> int | None:
        """TP degree for all pools to begin in, by requests that have not begun, on average over
        scenarios of their lengths. None: they stay as they are, of equal ones too.

        The same for all, as prompts are dealt evenly over engines; the slowest pool counts.
        """
        found = [of for state in states if (of := self._openings(state, effects))]
        if not found:
            return None
        totals = {degree: fmean(of[degree] for of in found) for degree in _common(found)}
        begun = [of for pool in effects.pools.values() if (of := working(pool, states[0]))]
        present = begun[0][0].tp_degree
        if present not in totals:
            return None
        self.forgone.add(present, totals)
        paid = [d for d in totals if self.forgone.totals[d] > self._change(d, effects)]
        best = min((present, *paid), key=lambda degree: totals[degree])
        if best != present:
            self.forgone.totals.clear()
        return None if all(of[0].tp_degree == best for of in begun) else best

    def _change(self, degree: int, effects: Effects) -> float:
        """The objective of a pool that changes to this TP degree before a stage begins."""
        assert effects.costs
        num_engines = max(len(pool.engines.get(degree, ())) for pool in effects.pools.values())
        return self.objective.of_layout(degree, [effects.costs.control_s] * num_engines)

    def _openings(self, state: StepState, effects: Effects) -> dict[int, float]:
        """The objective by TP degree, the present one first."""
        pools = [pool for pool in effects.pools.values() if working(pool, state)]
        by_pool = [self._pool_openings(pool, state, effects) for pool in pools]
        if not by_pool:
            return {}
        return {degree: max(of[degree] for of in by_pool) for degree in _common(by_pool)}

    def _pool_openings(self, pool: Pool, state: StepState, effects: Effects) -> dict[int, float]:
        present = working(pool, state)
        assert present
        totals = {present[0].tp_degree: self.least(pool, state, effects, LATER_SHARE)}
        knows = state.forecaster.knows
        if not all(map(knows, present)):
            return totals
        for degree in [degree for degree in pool.engines if degree not in totals]:
            dealt = deal_anew(present, pool.engines[degree], degree)
            if not all(map(knows, dealt)):
                continue
            begun = StepState.of(state.forecaster, state.rows, dealt)
            totals[degree] = self.least(pool, begun, effects, LATER_SHARE)
        return totals

    def least(
        self, pool: Pool, state: StepState, effects: Effects, later_share: float = 0.0
    ) -> float:
        """The objective of a pool that is at work, left as it is or with the best later switch.
        `later_share`: by which that must be better, as the best of many forecasts is better than it
        will be."""
        sources = working(pool, state)
        assert sources
        look = _PoolLook(self, pool, sources, state, effects)
        stays, later = look.stays(), look.later()
        return min(stays, (1 + later_share) * later)


def _common(totals: Sequence[dict[int, float]]) -> list[int]:
    """TP degrees that all have, in the order of the first."""
    return [degree for degree in totals[0] if all(degree in of for of in totals)]


@dataclass(frozen=True)
class _PoolLook:
    """A pool at one moment."""

    reshaping: Reshaping
    pool: Pool
    sources: Sequence[EngineState]
    state: StepState
    effects: Effects

    def proposals(self) -> Iterator[Proposal]:
        """The best switch that is no guess, if now is the moment."""
        for total, made in sorted(self._switched(), key=lambda at: at[0]):
            if total >= self.stays() or any(later < total for later in self._laters()):
                return
            if self._knows(*self.sources, *made.targets):
                move = Reshape(self.pool.index, made.targets[0].tp_degree, made.move_kv)
                yield Proposal("reshape", (move,))
                return

    def _knows(self, *engines: EngineState) -> bool:
        return all(map(self.state.forecaster.knows, engines))

    def stays(self) -> float:
        """The objective, left alone."""
        return self.reshaping.objective.of_layout(self.sources[0].tp_degree, self._ends_s())

    def later(self) -> float:
        """The best of going on first and switching then; infinite where there is nothing."""
        return min(self._laters(), default=math.inf)

    def _laters(self) -> Iterator[float]:
        """The objective with later switches."""
        end_s = max(self._ends_s())
        # The last ones first: fewer requests are left, and what is better later mostly is late.
        for share in reversed(self.reshaping.wait_shares):
            yield from (total for total, _ in self._switched(share * end_s))

    def _ends_s(self) -> list[float]:
        return [self.state.engine_end_s(source.engine) for source in self.sources]

    def _switched(self, wait_s: float = 0.0) -> Iterator[tuple[float, Switched]]:
        """Switches to higher TP degrees that are decided then, with the objective. Where engines
        are freed for the next step, only while all are there that are now."""
        objective, course = self.reshaping.objective, self.state.forecaster.course
        present, found = self.sources[0].tp_degree, self.effects.switches
        for degree in [degree for degree in self.pool.engines if degree > present]:
            for made in found(self._courses, self.pool, degree, wait_s):
                if not (objective.idles or self._all_there(made)):
                    continue
                ends_s = [made.ready_s + course(target).end_s for target in made.targets]
                yield objective.of_layout(degree, ends_s), made

    @cached_property
    def _courses(self) -> list[Course]:
        return [self.state.course(source) for source in self.sources]

    def _all_there(self, made: Switched) -> bool:
        both = zip(self.sources, made.sources, strict=True)
        return all(then.copies or not now.copies for now, then in both)
