"""When a pool's GPUs would be better off in another layout, as proposals. Pure.

    now     all requests, dealt anew over the engines of a higher TP degree, and what that costs
    later   the same after having gone on for a while, for some moments until the pool's end

Who knows of the tail would switch from the start, as a switch pays at any time before it: what is
proposed is a switch that is no better later (`engines.pat.switch`). With `redrafting`, requests are
also drafted for as is best in the new layout, as another proposal: a faster step leaves less to
draft in, and a merged batch less to verify.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from engines.control.effects import Effects, deal, working
from engines.control.objective import Objective, SoonestEnd
from engines.control.proposal import Proposal
from engines.control.redrafting import Redrafting
from engines.control.state import EngineState, Forecaster, StepState, merge
from engines.rollout.moves import Redraft, Reshape, RolloutView
from schemas.layout import Pool
from schemas.rollout import DraftSetting


@dataclass
class Reshaping:
    """For each pool its higher layouts."""

    redrafting: Redrafting | None = None
    objective: Objective = field(default_factory=SoonestEnd)
    wait_shares: Sequence[float] = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    """Later moments, as shares of the time until the pool's end."""
    name: str = "reshape"

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del view
        if self.redrafting:
            self.redrafting.look(state)
        return [
            proposal
            for pool in effects.pools.values()
            if (sources := working(pool, state))
            for proposal in _Look(self, pool, sources, state, effects).proposals()
        ]

    def note(self, proposal: Proposal) -> None:
        if self.redrafting:
            self.redrafting.note(proposal)


@dataclass(frozen=True)
class _Look:
    """One at a pool."""

    reshaping: Reshaping
    pool: Pool
    sources: Sequence[EngineState]
    state: StepState
    effects: Effects

    def proposals(self) -> Iterator[Proposal]:
        for redraft in (False, True) if self.reshaping.redrafting else (False,):
            found = [self._switched(self.sources, d, redraft) for d in self._higher()]
            if not found:
                continue
            total, targets = min(found, key=lambda at: at[0])
            if total < self._left_alone() and total <= self._later(redraft):
                yield Proposal(self.reshaping.name, (*self._redrafts(targets), self._move(targets)))

    def _higher(self) -> list[int]:
        return [degree for degree in self.pool.engines if degree > self.sources[0].tp_degree]

    def _left_alone(self) -> float:
        ends_s = [self.state.engine_end_s(source.engine) for source in self.sources]
        return self.reshaping.objective.of_layout(self.sources[0].tp_degree, ends_s)

    def _later(self, redraft: bool) -> float:
        """The best of going on first and switching then. Where engines are freed for the next step,
        only while all are there."""
        ends_s = [self.state.engine_end_s(source.engine) for source in self.sources]
        best = float("inf")
        for share in self.reshaping.wait_shares:
            wait_s = share * max(ends_s)
            sources = [self._forecaster.later(source, wait_s) for source in self.sources]
            left = [bool(source.copies) for source in sources]
            if not any(left) or not (all(left) or self.reshaping.objective.idles):
                continue
            totals = (self._switched(sources, d, redraft, wait_s)[0] for d in self._higher())
            best = min(best, *totals)
        return best

    def _switched(
        self, sources: Sequence[EngineState], degree: int, redraft: bool, wait_s: float = 0.0
    ) -> tuple[float, list[EngineState]]:
        """(objective, engines of the new layout)."""
        targets = deal(merge(sources), self.pool.engines[degree], degree)
        if redraft:
            targets = [self._redrafted(target) for target in targets]
        delay_s = wait_s + self.effects.switch_cost(sources, targets).seconds
        ends_s = [
            delay_s + max(self._forecaster.times_s(target).values(), default=0.0)
            for target in targets
        ]
        return self.reshaping.objective.of_layout(degree, ends_s), targets

    def _redrafted(self, engine: EngineState) -> EngineState:
        redrafting = self.reshaping.redrafting
        assert redrafting is not None
        found = redrafting.settings(engine, self.effects.acceptances)
        settings = {copy.row: setting for copy, setting in found}
        copies = tuple(
            self.effects.redrafted(copy, settings[copy.row]) if copy.row in settings else copy
            for copy in engine.copies
        )
        return replace(engine, copies=copies)

    def _move(self, targets: Sequence[EngineState]) -> Reshape:
        move_kv = self.effects.switch_cost(self.sources, targets).move_kv
        return Reshape(self.pool.index, targets[0].tp_degree, move_kv)

    def _redrafts(self, targets: Sequence[EngineState]) -> Iterator[Redraft]:
        """Before the switch, where they are: settings go along."""
        wanted: dict[int, DraftSetting | None] = {
            copy.row: copy.drafting for target in targets for copy in target.copies
        }
        for source in self.sources:
            for copy in source.copies:
                setting = wanted[copy.row]
                if setting and setting != copy.drafting:
                    yield Redraft(copy.id, source.engine, setting)

    @property
    def _forecaster(self) -> Forecaster:
        return self.state.forecaster
