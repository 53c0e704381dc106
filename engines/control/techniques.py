"""What there is to propose, each technique by itself. Pure.

    Reshaping    PAT: a pool's GPUs in another layout
    Racing       SpecActor, Algorithm 3: a freed engine races requests with another drafter
    Redrafting   SpecActor, Algorithm 2: window and mode by request; or to begin with drafting
    Spreading    requests of the engine that ends last, to one that is free
    Outliers     HistoPipe: what has outgrown its ranking group leaves it

None looks at whether its moves pay.

Deviations: Algorithm 2 looks at requests below the mean acceptance, alone on their engine (b = 1);
here all of an engine are looked at together, with its batch and context and at its TP degree, as a
longer window of one is a longer step for all. Everybody keeps the drafter that it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from engines.control.controller import Proposal
from engines.control.effects import Effects, deal, working
from engines.control.state import Copy, EngineState, StepState, merge
from engines.histopipe.migration import Migration
from engines.latency.interface import Latency
from engines.rollout.moves import Migrate, Race, Redraft, Reshape, RolloutView
from engines.specactor.best_of_n import BestOfN
from engines.specactor.expectation import coupled_tokens_per_s, streamed_tokens_per_s
from schemas.rollout import DraftSetting, RequestId


class _Traceless:
    """Remembers nothing of what was taken."""

    def note(self, proposal: Proposal) -> None:
        pass


class Reshaping(_Traceless):
    """Each other layout of each pool."""

    name = "reshape"

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del view
        return list(self._proposals(state, effects))

    def _proposals(self, state: StepState, effects: Effects) -> Iterator[Proposal]:
        for pool in effects.pools.values():
            sources = working(pool, state)
            if sources is None:
                continue
            copies = merge(sources)
            for tp_degree, engines in pool.engines.items():
                if tp_degree == sources[0].tp_degree:
                    continue
                targets = deal(copies, engines, tp_degree)
                move_kv = effects.switch_cost(sources, targets).move_kv
                yield Proposal(self.name, (Reshape(pool.index, tp_degree, move_kv),))


class Racing:
    """One proposal for each freed engine."""

    name = "race"

    def __init__(self, best_of_n: BestOfN) -> None:
        self._best_of_n = best_of_n

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del state, effects
        by_engine: dict[int, list[Race]] = {}
        for race in self._best_of_n.propose(view):
            by_engine.setdefault(race.to_engine, []).append(race)
        return [Proposal(self.name, tuple(races), free=True) for races in by_engine.values()]

    def note(self, proposal: Proposal) -> None:
        self._best_of_n.note(move for move in proposal.moves if isinstance(move, Race))


@dataclass
class Redrafting:
    """One proposal for each engine: the fastest setting of each of its requests."""

    latency: Latency
    drafters: Sequence[str] = ()
    """For requests that are not drafted for, where one pays; none: they stay so."""
    modes: Sequence[bool] = (True,)
    """Of `DraftSetting.coupled`."""
    max_window: int = 16
    max_batch: int = 64
    """Engines with more requests are left alone."""
    every_tokens: int = 1000
    """Between two turns of a request."""
    name: str = "redraft"
    _turns: dict[RequestId, float] = field(default_factory=dict)
    """Context tokens at which a request may have its next turn."""
    _contexts: Mapping[RequestId, float] = field(default_factory=dict)

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        told = {e.engine: e.drafting for e in view.engines}
        self._contexts = {c.id: c.context_tokens for e in state.engines.values() for c in e.copies}
        found = []
        for engine in state.engines.values():
            if not 0 < len(engine.copies) <= self.max_batch:
                continue
            verified = {id for id, p in told[engine.engine].items() if p.num_draft_tokens}
            moves = tuple(self._moves(engine, verified, effects.acceptances))
            if moves:
                found.append(Proposal(self.name, moves))
        return found

    def note(self, proposal: Proposal) -> None:
        for move in proposal.moves:
            assert isinstance(move, Redraft)
            self._turns[move.id] = self._contexts[move.id] + self.every_tokens

    def _moves(
        self, engine: EngineState, verified: set[RequestId], acceptances: Mapping[str, float]
    ) -> Iterator[Redraft]:
        at = (engine.tp_degree, len(engine.copies), _coarse(engine.context_tokens))
        for copy in engine.copies:
            if copy.context_tokens < self._turns.get(copy.id, 0.0):
                continue
            if copy.drafting and copy.id not in verified:
                continue
            setting = self._best(copy, at, acceptances)
            if setting and setting != copy.drafting:
                yield Redraft(copy.id, engine.engine, setting)

    def _best(
        self, copy: Copy, at: tuple[int, int, float], acceptances: Mapping[str, float]
    ) -> DraftSetting | None:
        if copy.drafting:
            return self._settings(copy.drafting.drafter, round(copy.acceptance, 2), *at)[1]
        rated = [self._settings(d, round(acceptances.get(d, 0.0), 2), *at) for d in self.drafters]
        decode_s = self.latency.decode_s(*at)
        paying = [found for found in rated if found[0] * decode_s > 1.0]
        return max(paying, key=lambda found: found[0])[1] if paying else None

    @property
    def _settings(self):
        return self._cached

    def __post_init__(self) -> None:
        self._cached = lru_cache(1 << 12)(self._fastest)

    def _fastest(
        self, drafter: str, acceptance: float, tp_degree: int, batch: int, context_tokens: float
    ) -> tuple[float, DraftSetting]:
        """(tokens per second, setting)."""
        settings = [
            DraftSetting(drafter, window, coupled)
            for coupled in self.modes
            for window in range(1, self.max_window + 1)
        ]
        at = tp_degree, batch, context_tokens
        rated = [(self._tokens_per_s(setting, acceptance, *at), setting) for setting in settings]
        return max(rated, key=lambda rated: rated[0])

    def _tokens_per_s(
        self,
        setting: DraftSetting,
        acceptance: float,
        tp_degree: int,
        batch: int,
        context_tokens: float,
    ) -> float:
        window = setting.window
        draft_s = self.latency.draft_s(setting.drafter, batch, window)
        verify_s = self.latency.verify_s(tp_degree, batch, context_tokens, window)
        if setting.coupled:
            return coupled_tokens_per_s(window, acceptance, draft_s, verify_s)
        return streamed_tokens_per_s(window, acceptance, draft_s / window, verify_s)


class Spreading(_Traceless):
    """For each free engine half of the requests of the one that would end last, among those with
    several; every other one by what they have left."""

    name = "spread"

    def __init__(self, max_moved: int = 16) -> None:
        """`max_moved`: requests of one proposal."""
        self._max_moved = max_moved

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del view, effects
        free = [engine.engine for engine in state.engines.values() if not engine.copies]
        return [
            Proposal(self.name, tuple(Migrate(copy.id, to) for copy in moved))
            for to, moved in zip(sorted(free), self._halves(state), strict=False)
        ]

    def _halves(self, state: StepState) -> Iterator[list[Copy]]:
        last_first = sorted(
            state.engines, key=lambda i: (-state.engine_end_s(i), i)
        )
        for index in last_first:
            alone = [
                copy for copy in state.engines[index].copies if len(state.holders[copy.id]) == 1
            ]
            alone.sort(key=lambda copy: -copy.remaining_tokens)
            if len(alone) > 1:
                yield alone[1::2][: self._max_moved]


class Outliers:
    """HistoPipe's migration, a proposal for each move."""

    name = "outliers"

    def __init__(self, migration: Migration) -> None:
        self._migration = migration
        self._view: RolloutView | None = None

    def propose(self, view: RolloutView, state: StepState, effects: Effects) -> list[Proposal]:
        del state, effects
        self._view = view
        return [Proposal(self.name, (move,)) for move in self._migration.propose(view)]

    def note(self, proposal: Proposal) -> None:
        assert self._view is not None
        self._migration.note(self._view, proposal.moves)


def _coarse(tokens: float) -> float:
    """To a tenth: settings are looked up as a rule."""
    step = max(1.0, 10.0 ** (len(str(int(tokens))) - 2))
    return round(tokens / step) * step or 1.0
