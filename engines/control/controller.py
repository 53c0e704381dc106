"""One controller for all moves: raise the TP degree, race, migrate, defer, or do nothing. Pure.

    view ─outlook─► state ◄──────────────┐ predicted state
                      │                  │
    techniques ─propose─► moves ─effects─┴─► gain ─► take the best, drop what conflicts, repeat

Techniques propose moves and the controller decides. A proposal that is not taken leaves no trace.
The controller compares all proposals with one latency model and in one unit: the predicted end of
the step (`objective`). Each proposal is charged its costs: waking engines, moving or recomputing
keys and values, and a slower step for the requests that stay. When no proposal pays, the controller
does nothing. To run a single technique, pass only that one.

A round takes the proposal with the largest gain for the requests that it touches, then the next, as
long as one pays. The controller makes several such choices and takes the best:

- among all proposals,
- among all, but starting with the one that brings the step's end forward most,
- among the proposals of each technique alone.

So the prediction is never worse than with any single proposal, with any single technique, or with
none. It need not be the best set of proposals: a move that pays only after another move is found in
the next round.

The lengths of responses are not known in advance. The controller therefore checks its choice in
further scenarios of the lengths, and drops proposals that would cost time on average. With
`shares_engines`, free engines race the requests of other engines. A move that is not free must then
touch a request that may be the last of the step. For this the controller keeps the last forecast of
every engine that has requests.

Rounds are rare. One starts when engines have become free, when enough requests have finished, or
after `every_s` seconds. `max_requests` bounds the requests that one call looks at.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from statistics import fmean

from engines.control.effects import Effect, Effects
from engines.control.objective import Gain, Objective, SoonestEnd
from engines.control.outlook import Outlook
from engines.control.proposal import MoveTechnique, Proposal
from engines.control.reshaping import Reshaping
from engines.control.state import StepState
from engines.rollout.moves import EngineView, Move, Reshape, RolloutView

MARGIN = 0.02
"""Least gain, as a share of the forecast for the touched requests. Forecasts are no better."""
SCENARIOS = (1 / 3, 2 / 3)
"""Further ways to assign lengths to requests (`engines.pat.remaining`). A decision made in one
scenario must pay on average over all of them."""
NEAR = 0.1
"""Share of the time to the step's end. A request whose forecast is this close to the end may still
be the last. Forecasts from history are about this far off: 6 to 17 % in PAT's setting."""
FINISHED_SHARE = 1 / 16
"""Share of the last round's requests that must finish before the next round starts."""


@dataclass(slots=True)
class _Weighed:
    technique: MoveTechnique
    proposal: Proposal
    effect: Effect
    gain: Gain


@dataclass
class Controller:
    """The controller of one generation stage."""

    techniques: Sequence[MoveTechnique]
    outlook: Outlook
    effects: Effects
    objective: Objective = field(default_factory=SoonestEnd)
    margin: float = MARGIN
    every_s: float = 5.0
    """Longest time between two rounds."""
    max_batch: int = 128
    """The controller skips engines with more unfinished requests: nothing to gain there yet."""
    max_requests: float = 192
    """Most requests that one call looks at (at least one pool). A larger round takes several."""
    opening: Reshaping | None = None
    """Chooses the layouts that a stage begins in. None: keep the layouts."""
    shares_engines: bool = False
    """Whether an engine that becomes free can help the requests of other engines."""
    _ends_s: dict[int, float] = field(default_factory=dict)
    """Last forecast of when each pool, or engine without a pool, runs out of requests."""
    _since_s: float = -math.inf
    """When the last round began. Pools that were looked at before then are due."""
    _num_looked_at: float = math.inf
    """Number of requests when the last round began, copies included."""
    _free: frozenset[int] = frozenset()
    _looked_at: dict[int, float] = field(default_factory=dict)
    """When each pool, or engine without a pool, was last looked at."""

    def begin(self, view: RolloutView) -> Sequence[Reshape]:
        """Return the layouts that the stage begins in. Empty while no lengths are known."""
        if self.opening is None or not self.outlook.remaining.is_known:
            return []
        states = [self.outlook.forecast(view, scenario) for scenario in (0.0, *SCENARIOS)]
        tp_degree = self.opening.opening(states, self.effects)
        return [Reshape(pool, tp_degree) for pool in self.effects.pools if tp_degree]

    def decide(self, view: RolloutView) -> Sequence[Move]:
        """Return the moves that follow from earlier moves, then the moves that pay now."""
        follows = [move for technique in self.techniques for move in technique.follow(view)]
        return [*follows, *self._weigh_all(view)]

    def _weigh_all(self, view: RolloutView) -> Sequence[Move]:
        if self._due(view):
            self._since_s = view.elapsed_s
        small = self._small(view)
        if not any(engine.progress for engine in small):
            return []
        state_view = replace(view, engines=small)
        state = self.outlook.forecast(state_view)
        effects = replace(self.effects, acceptances=self.outlook.acceptances)
        weighed = [
            weighed
            for technique in self.techniques
            for proposal in technique.propose(view, state, effects)
            if (weighed := self._weigh(technique, proposal, state, effects)) and self._pays(weighed)
        ]
        self._note_ends(view, state)
        others: list[StepState] = []
        if weighed and self.outlook.remaining.is_known:
            others = [self.outlook.forecast(state_view, scenario) for scenario in SCENARIOS]
        if others and self.shares_engines:
            last_s = max(self._ends_s.values()) - view.elapsed_s
            weighed = [one for one in weighed if _may_be_last(one, [state, *others], last_s)]
        taken = self._best_choice(weighed, state, effects)
        taken = [one for one in taken if self._pays_in_all(one, others, effects)]
        for one in taken:
            one.technique.note(one.proposal)
        moves = [move for one in taken for move in one.proposal.moves]
        self.outlook.note(moves)
        return moves

    def _small(self, view: RolloutView) -> tuple[EngineView, ...]:
        """Return the engines to look at: free engines, and as many due pools as `max_requests`
        allows. The pools that have waited longest come first."""
        fitting = [e for e in view.engines if len(e.progress) <= self.max_batch]
        groups: dict[int, list[EngineView]] = {}
        for engine in fitting:
            group = self._group(engine.engine)
            if engine.progress and self._looked_at.get(group, -math.inf) < self._since_s:
                groups.setdefault(group, []).append(engine)
        num, looked = 0, set()
        for group in sorted(groups, key=lambda group: self._looked_at.get(group, -math.inf)):
            num += sum(len(engine.progress) for engine in groups[group])
            if looked and num > self.max_requests:
                break
            looked |= {engine.engine for engine in groups[group]}
            self._looked_at[group] = view.elapsed_s
        return tuple(e for e in fitting if not e.progress or e.engine in looked)

    def _group(self, engine: int) -> int:
        """Return the engine's pool, or a negative number of its own if it has no pool."""
        return self._group_of.get(engine, -1 - engine)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        """Pool index by engine."""
        pools = self.effects.pools.values()
        return {i: pool.index for pool in pools for own in pool.engines.values() for i in own}

    def _due(self, view: RolloutView) -> bool:
        free = frozenset(engine.engine for engine in view.engines if not engine.progress)
        num = sum(len(engine.progress) for engine in view.engines)
        due = (
            not free <= self._free
            or num <= self._num_looked_at * (1 - FINISHED_SHARE)
            or view.elapsed_s - self._since_s >= self.every_s
        )
        if due:
            self._free, self._num_looked_at = free, num
        return due

    def _weigh(
        self, technique: MoveTechnique, proposal: Proposal, state: StepState, effects: Effects
    ) -> _Weighed | None:
        """Return the proposal with its gain, or None when it is not possible."""
        effect = effects.of(state, proposal.moves)
        if effect is None:
            return None
        return _Weighed(technique, proposal, effect, self.objective.gain(state, effect))

    def _best_choice(
        self, paying: Sequence[_Weighed], state: StepState, effects: Effects
    ) -> list[_Weighed]:
        """Return the best of several choices. In a tie, the choice from all proposals wins."""
        if not paying:
            return []
        names = sorted({one.proposal.technique for one in paying})
        soonest = max(paying, key=lambda one: one.gain.whole)
        choices = [self._choose(paying, state, effects, first) for first in (None, soonest)]
        if len(names) > 1:
            own = ([p for p in paying if p.proposal.technique == name] for name in names)
            choices += [self._choose(start, state, effects) for start in own]
        return min(choices, key=lambda choice: self.objective.total(choice[1]))[0]

    def _choose(
        self,
        paying: Sequence[_Weighed],
        state: StepState,
        effects: Effects,
        first: _Weighed | None = None,
    ) -> tuple[list[_Weighed], StepState]:
        """Take proposals one after the other, `first` before all. Return them with the final state.

        When an earlier proposal has touched the engines of the next one, weigh the next one again:
        there is usually less left to gain.
        """
        taken: list[_Weighed] = []
        # (minus gain, place to break ties, proposal, number taken when it was weighed)
        left = [(-one.gain.own, place, one, 0) for place, one in enumerate(paying)]
        left = [entry for entry in left if entry[2] is not first]
        heapify(left)
        if first:
            taken.append(first)
            state = first.effect.after(state)
        while left:
            _, place, one, num_known = heappop(left)
            touched = (other.effect.engines for other in taken[num_known:])
            if all(one.effect.engines.isdisjoint(engines) for engines in touched):
                taken.append(one)
                state = one.effect.after(state)
                continue
            again = self._weigh(one.technique, one.proposal, state, effects)
            if again and self._pays(again):
                heappush(left, (-again.gain.own, place, again, len(taken)))
        return taken, state

    def _note_ends(self, view: RolloutView, state: StepState) -> None:
        """Record when each engine in `state` runs out of requests. Forget the idle ones."""
        at_work = {self._group(engine.engine) for engine in view.engines if engine.progress}
        self._ends_s = {group: self._ends_s.get(group, math.inf) for group in at_work}
        looked = [engine.engine for engine in state.engines.values() if engine.copies]
        self._ends_s |= dict.fromkeys(map(self._group, looked), 0.0)
        for index in looked:
            group, end_s = self._group(index), view.elapsed_s + state.engine_end_s(index)
            self._ends_s[group] = max(self._ends_s[group], end_s)

    def _pays_in_all(
        self, weighed: _Weighed, others: Sequence[StepState], effects: Effects
    ) -> bool:
        """Return whether the proposal pays on average, over its own scenario and `others`."""
        if weighed.proposal.free:
            return True
        gains = [weighed.gain.own]
        for state in others:
            effect = effects.of(state, weighed.proposal.moves)
            # The requests may all end while keys and values are saved. Then nothing is done.
            gains.append(self.objective.gain(state, effect).own if effect else 0.0)
        return fmean(gains) > 0.0

    def _pays(self, weighed: _Weighed) -> bool:
        gain = weighed.gain
        return gain.pays(self.margin) or (weighed.proposal.free and gain.own >= 0.0)


def _may_be_last(weighed: _Weighed, states: Sequence[StepState], last_s: float) -> bool:
    """Return whether the proposal is free, or touches a request that may be the last of the step.

    The request must end near `last_s`, the step's end, in one of the scenarios without the move.
    """
    rows = weighed.effect.requests
    ends_s = (max((state.ends_s[row] for row in rows), default=0.0) for state in states)
    return weighed.proposal.free or max(ends_s) >= (1 - NEAR) * last_s
