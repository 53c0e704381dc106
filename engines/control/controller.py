"""One controller over all moves: raise TP, race, redraft, migrate, or leave alone. Pure.

    view ─outlook─► state ◄──────────────┐ as it would be
                      │                  │
    techniques ─propose─► moves ─effects─┴─► gain ─► take the best, drop what it spoils, again

Techniques propose and never decide; a proposal that is not taken leaves no trace. All are compared
by one latency model in one unit, the predicted end of the step (`objective`), each with what it
costs: waking engines, moving or computing keys and values, a slower step for those that stay. When
nothing pays, nothing is done. A single technique is this controller with the others left out.

What is best for those whom it touches is taken, as long as something pays. That is done with all
proposals, beginning with what brings the step's end forward most, and with those of each technique
alone, and the best of these choices is made. So it is predicted to be no worse than any one
proposal, than any technique by itself, and than nothing. It is not the best set of proposals: a
move whose worth shows only after another one is found in the next round.

Nobody knows how long which response will be. What the choice of one scenario of lengths brings is
looked at in others, and what would cost time on average is left out. Where engines that become free
are of use to others, whose requests they race, they are spent on nobody else than may be the last
of the step: by forecasts of all that is at work, as of when it was looked at.

Rounds are few: when engines have become free, when so many requests have finished, and every so
many seconds. What one takes at a time is bounded by `max_requests`.
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
"""Least gain of what is touched, as a share: forecasts are no better than that."""
SCENARIOS = (1 / 3, 2 / 3)
"""Further ways in which lengths may be among the requests (`engines.pat.remaining`): what is
decided by one of them must pay on average over all."""
NEAR = 0.1
"""Share of the time to the step's end within which who ends sooner may yet be the last: about as
far as forecasts by history are off (`forecast_error_history_*` of `simulate --paper pat`)."""
FINISHED_SHARE = 1 / 16
"""Share of the last round's requests that have finished when the next round begins."""


@dataclass(slots=True)
class _Weighed:
    technique: MoveTechnique
    proposal: Proposal
    effect: Effect
    gain: Gain


@dataclass
class Controller:
    """Decides for one generation stage."""

    techniques: Sequence[MoveTechnique]
    outlook: Outlook
    effects: Effects
    objective: Objective = field(default_factory=SoonestEnd)
    margin: float = MARGIN
    every_s: float = 5.0
    """Between two rounds, at most."""
    max_batch: int = 128
    """Engines with more unfinished requests are not looked at: there is nothing to gain yet."""
    max_requests: float = 192
    """Requests that are looked at in one go; one pool at least. A round of more takes several."""
    opening: Reshaping | None = None
    """Chooses the layouts in which a stage begins; None: they stay as they are."""
    shares_engines: bool = False
    """Whether an engine that becomes free is of use to others."""
    _ends_s: dict[int, float] = field(default_factory=dict)
    """When each pool, or engine without one, was last forecast to have nothing left."""
    _since_s: float = -math.inf
    """When the last round began: pools looked at before have their turn."""
    _num_looked_at: float = math.inf
    """Requests when it began, copies included."""
    _free: frozenset[int] = frozenset()
    _looked_at: dict[int, float] = field(default_factory=dict)
    """When each pool, or engine without one, was looked at last."""

    def begin(self, view: RolloutView) -> Sequence[Reshape]:
        """Layouts in which the stage begins, where something is known of lengths."""
        if self.opening is None or not self.outlook.remaining.is_known:
            return []
        states = [self.outlook.forecast(view, scenario) for scenario in (0.0, *SCENARIOS)]
        tp_degree = self.opening.opening(states, self.effects)
        return [Reshape(pool, tp_degree) for pool in self.effects.pools if tp_degree]

    def decide(self, view: RolloutView) -> Sequence[Move]:
        """Moves that follow from those before, then those that pay now."""
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
        """Engines that are looked at: free ones, and pools whose turn it is, as many as there is
        time for, those not looked at for longest first."""
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
        """The pool of an engine, or a number of its own."""
        return self._group_of.get(engine, -1 - engine)

    @cached_property
    def _group_of(self) -> dict[int, int]:
        """The pool of each engine."""
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
        """None: it is not possible."""
        effect = effects.of(state, proposal.moves)
        if effect is None:
            return None
        return _Weighed(technique, proposal, effect, self.objective.gain(state, effect))

    def _best_choice(
        self, paying: Sequence[_Weighed], state: StepState, effects: Effects
    ) -> list[_Weighed]:
        """The best of several choices; of equal ones that of all proposals."""
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
        """One after the other, `first` before all, with the state after them.

        What one that was taken has touched is weighed again when it would be next: others leave
        less to gain as a rule.
        """
        taken: list[_Weighed] = []
        # Gain, its place among equal ones, itself, and how many were taken when it was weighed.
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
        """Note when what was looked at will have nothing left, and forget who has nothing."""
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
        """Whether it pays on average over the scenarios, of which one was looked at."""
        if weighed.proposal.free:
            return True
        gains = [weighed.gain.own]
        for state in others:
            effect = effects.of(state, weighed.proposal.moves)
            # Where nobody is left once keys and values are saved, nothing is done.
            gains.append(self.objective.gain(state, effect).own if effect else 0.0)
        return fmean(gains) > 0.0

    def _pays(self, weighed: _Weighed) -> bool:
        gain = weighed.gain
        return gain.pays(self.margin) or (weighed.proposal.free and gain.own >= 0.0)


def _may_be_last(weighed: _Weighed, states: Sequence[StepState], last_s: float) -> bool:
    """Whether what it touches may, left alone, end the step by one of these scenarios, or it costs
    nobody anything. `last_s`: when the step would end."""
    rows = weighed.effect.requests
    ends_s = (max((state.ends_s[row] for row in rows), default=0.0) for state in states)
    return weighed.proposal.free or max(ends_s) >= (1 - NEAR) * last_s
