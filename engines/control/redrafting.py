"""How requests are drafted for, proposed engine by engine. Pure.

Deviations from SpecActor's Algorithm 2: it looks at requests below the mean acceptance, each alone
on its engine (b = 1); here all of an engine are looked at together, with its batch and context and
at its TP degree, as a longer window of one is a longer step for all. Requests that are not drafted
for may begin to be, where a drafter pays. Everybody else keeps the drafter that it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engines.control.effects import Effects
from engines.control.proposal import Proposal
from engines.control.state import Copy, EngineState, StepState
from engines.latency.interface import Latency
from engines.rollout.moves import Redraft, RolloutView
from engines.specactor.expectation import coupled_tokens_per_s, streamed_tokens_per_s
from schemas.rollout import DraftSetting, RequestId

Place = tuple[int, int, float]
"""(TP degree, batch, context tokens) of an engine."""


@dataclass
class Redrafting:
    """One proposal for each engine: the fastest setting of each of its requests."""

    latency: Latency
    drafters: Sequence[str] = ()
    """For requests that are not drafted for; none: they stay so."""
    modes: Sequence[bool] = (True,)
    """Of `DraftSetting.coupled`."""
    max_window: int = 16
    every_tokens: int = 1000
    """Between two turns of a request."""
    name: str = "redraft"
    _turns: dict[RequestId, float] = field(default_factory=dict)
    """Context tokens at which a request may have its next turn."""
    _contexts: Mapping[RequestId, float] = field(default_factory=dict)
    """Of the last look."""
    _known: dict[tuple, tuple[float, DraftSetting]] = field(default_factory=dict)

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        self.look(state)
        verified = {
            id
            for engine in view.engines
            for id, told in engine.drafting.items()
            if told.num_draft_tokens
        }
        proposals = []
        for engine in state.engines.values():
            settings = self.settings(engine, effects.acceptances)
            moves = tuple(
                Redraft(copy.id, engine.engine, setting)
                for copy, setting in settings
                # What is drafted for is known first.
                if copy.drafting is None or copy.id in verified
            )
            if moves:
                proposals.append(Proposal(self.name, moves))
        return proposals

    def look(self, state: StepState) -> None:
        """How far all requests are."""
        engines = state.engines.values()
        self._contexts = {copy.id: copy.context_tokens for e in engines for copy in e.copies}

    def note(self, proposal: Proposal) -> None:
        for move in proposal.moves:
            if isinstance(move, Redraft):
                self._turns[move.id] = self._contexts[move.id] + self.every_tokens

    def settings(
        self, engine: EngineState, acceptances: Mapping[str, float]
    ) -> Iterator[tuple[Copy, DraftSetting]]:
        """Of those of its requests that would be faster otherwise; `acceptances`: of drafters that
        a request does not have yet."""
        if not engine.copies:
            return
        place = engine.tp_degree, len(engine.copies), _coarse(engine.context_tokens)
        for copy in engine.copies:
            if copy.context_tokens >= self._turns.get(copy.id, 0.0):
                setting = self._best(copy, place, acceptances)
                if setting and setting != copy.drafting:
                    yield copy, setting

    def _best(
        self, copy: Copy, place: Place, acceptances: Mapping[str, float]
    ) -> DraftSetting | None:
        if copy.drafting:
            return self._fastest(copy.drafting.drafter, copy.acceptance, place)[1]
        rated = [self._fastest(d, acceptances.get(d, 0.0), place) for d in self.drafters]
        decode_s = self.latency.decode_s(*place)
        paying = [found for found in rated if found[0] * decode_s > 1.0]
        return max(paying, key=lambda found: found[0])[1] if paying else None

    def _fastest(self, drafter: str, acceptance: float, place: Place) -> tuple[float, DraftSetting]:
        """(tokens per second, setting), looked up as a rule."""
        key = drafter, round(acceptance, 2), place
        if key not in self._known:
            self._known[key] = max(self._rated(*key), key=lambda rated: rated[0])
        return self._known[key]

    def _rated(
        self, drafter: str, acceptance: float, place: Place
    ) -> Iterator[tuple[float, DraftSetting]]:
        for window in range(1, self.max_window + 1):
            draft_s = self.latency.draft_s(drafter, place[1], window)
            verify_s = self.latency.verify_s(*place, window)
            for coupled in self.modes:
                if coupled:
                    speed = coupled_tokens_per_s(window, acceptance, draft_s, verify_s)
                else:
                    speed = streamed_tokens_per_s(window, acceptance, draft_s / window, verify_s)
                yield speed, DraftSetting(drafter, window, coupled)


def _coarse(tokens: float) -> float:
    """To two digits: there are few to look up."""
    return max(1.0, float(f"{tokens:.1e}"))
