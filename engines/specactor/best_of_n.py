"""Freed engines race the last requests with other drafters (SpecActor, Algorithm 3). Pure.

    freed engine ──argmin_d |W_d|──► one draft method ◄── requests, those that end last first,
                                                          while load < b_max

The request that is likely to end last gets every method that it lacks before the next one gets any,
as far as there is room. W_d: the engines that race with method d at present, those with room to
spare among them. A raced request stays where it is; of its copies, the first to finish counts. Once
a copy has clearly more tokens, it is taken from where it was: that batch is shorter without it.

Deviations:
- Where a prompt's lengths in its last epoch are known, the request that ends last is the one with
  the most verifications to come, so one that is nearly done is not raced for its few right drafts.
  Without, it is the one with the lowest acceptance, as in the paper.
- A copy with the drafter that a request has already is never made, so a freed engine takes no
  method that no request lacks.
- The acceptance of a raced request is the best of its copies': that one sets its pace. A request
  without comes last; where lengths are known, it is taken to have no drafts accepted.
- Races are coupled or decoupled as their setting says. Decoupled, a freed engine stands for a
  drafter and its verifier; drafters are not packed onto existing ones.
- Of methods with equally few engines, a freed engine takes the first: they are given in the order
  of what they are expected to bring.
- W_d does not count the engines on which the rollout began with method d: all began with one.
- Of engines with room, a request goes to one of a node that it is on: its keys and values go along.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engines.rollout.moves import Concede, EngineView, Race, RolloutView
from engines.specactor.expectation import expected_tokens
from engines.specactor.ladder import request_acceptance
from schemas.rollout import DraftProgress, DraftSetting, RequestId

TokensToCome = Callable[[Mapping[RequestId, int]], Mapping[RequestId, float]]
"""Response tokens so far, by request, to those that are expected to come."""
LEAD_TOKENS = 512
"""Response tokens by which a copy leads clearly: engines tell of theirs at different times."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An unfinished request."""

    id: RequestId
    acceptance: float | None
    """Probability that a draft token is accepted; None while nothing was verified."""
    drafters: frozenset[str]
    """Drafters that it has, on any engine."""
    engines: frozenset[int]
    """Engines that it is on."""
    nodes: frozenset[str | None] = frozenset()
    """Nodes of these."""
    steps_to_come: float = 0.0
    """Verifications until it ends, as expected; 0 for all where no lengths are known."""


@dataclass(frozen=True, slots=True)
class Racer:
    """An engine that was freed: it races, or may."""

    engine: int
    drafter: str | None
    """Drafter that it races with; None: it has no requests, and no method yet."""
    load: int
    """Requests on it."""
    node: str | None = None
    """Node that it is on; None: it is not known."""


def assign_races(
    contenders: Sequence[Contender],
    racers: Sequence[Racer],
    settings: Mapping[str, DraftSetting],
    max_batch: int,
) -> list[Race]:
    """New copies, in the order in which they are decided. `max_batch`: b_max, requests that an
    engine verifies at once. Ties go to the first drafter, the lower engine, the lower id."""
    node_of = {racer.engine: racer.node for racer in racers}
    methods = _methods(contenders, racers, list(settings))
    room = {racer.engine: max_batch - racer.load for racer in racers}
    by_drafter = {d: [engine for engine in methods if methods[engine] == d] for d in settings}
    races = []
    for contender in sorted(contenders, key=_rank):
        for drafter, setting in settings.items():
            if drafter in contender.drafters:
                continue
            free = [e for e in by_drafter[drafter] if room[e] > 0 and e not in contender.engines]
            if free:
                engine = min(free, key=lambda e: node_of[e] not in contender.nodes)
                races.append(Race(contender.id, engine, setting))
                room[engine] -= 1
    return races


def _methods(
    contenders: Sequence[Contender], racers: Sequence[Racer], drafters: Sequence[str]
) -> dict[int, str]:
    """The method of each engine, by ascending engine: that with the fewest engines so far, of those
    that some request lacks (lines 1-3)."""
    lacked = [d for d in drafters if any(d not in contender.drafters for contender in contenders)]
    num_engines = {d: sum(racer.drafter == d for racer in racers) for d in drafters}
    methods = {}
    for racer in sorted(racers, key=lambda racer: racer.engine):
        if racer.drafter is not None:
            methods[racer.engine] = racer.drafter
        elif lacked:
            drafter = min(lacked, key=num_engines.__getitem__)
            num_engines[drafter] += 1
            methods[racer.engine] = drafter
    return methods


def _rank(contender: Contender) -> tuple:
    unknown = contender.acceptance is None
    slowness = -contender.steps_to_come, unknown, contender.acceptance or 0.0
    id = contender.id
    return *slowness, id.split, id.step, id.prompt_key, id.sample_index


class BestOfN:
    """Decides for one generation stage. Remembers its races, as a view may lag behind."""

    def __init__(
        self,
        methods: Sequence[DraftSetting],
        *,
        initial: str | None,
        max_batch: int,
        to_come: TokensToCome | None = None,
    ) -> None:
        """`methods`: one setting of each drafter to race with. `initial`: the drafter with which
        the rollout began; requests have it until an engine says otherwise. `to_come`: None where no
        lengths are known. Raises ValueError."""
        self._settings = {setting.drafter: setting for setting in methods}
        if len(self._settings) < len(methods) or max_batch < 1:
            raise ValueError(f"one setting of each drafter and a batch of at least 1: {methods}")
        self._initial, self._max_batch, self._to_come = initial, max_batch, to_come
        self._races: dict[RequestId, dict[str, int]] = {}
        """Engine of each copy, by drafter, of the requests that are raced."""
        self._conceded: dict[RequestId, dict[int, str | None]] = {}
        """Drafter that a raced request had on each engine that it was taken from."""

    def decide(self, view: RolloutView) -> list[Race | Concede]:
        races = self.propose(view)
        self.note(races)
        return [*races, *self.concede(view)]

    def concede(self, view: RolloutView) -> list[Concede]:
        """Requests to take from where they were before they were raced, as a copy leads."""
        by_engine = {engine.engine: engine for engine in view.engines}
        moves = []
        for id, races in self._races.items():
            holders = self._holders(id, by_engine)
            raced = [engine.progress[id] for i, engine in holders.items() if i in races.values()]
            for index, engine in holders.items():
                trails = raced and engine.progress[id] + LEAD_TOKENS <= max(raced)
                if index not in races.values() and trails:
                    drafter = _drafter(engine.drafting.get(id), self._initial)
                    self._conceded.setdefault(id, {})[index] = drafter
                    moves.append(Concede(id, index))
        return moves

    def _holders(self, id: RequestId, by_engine: Mapping[int, EngineView]) -> dict[int, EngineView]:
        """Engines that have it, and are to keep it."""
        gone = self._conceded.get(id, {})
        return {i: e for i, e in by_engine.items() if id in e.progress and i not in gone}

    def propose(self, view: RolloutView, among: Container[RequestId] | None = None) -> list[Race]:
        """Races that are to be noted where they are made; `among`: those that may be raced."""
        if not self._races and all(engine.progress for engine in view.engines):
            return []
        finished = [id for id in self._races if not any(id in e.progress for e in view.engines)]
        for id in finished:
            del self._races[id]
            self._conceded.pop(id, None)
        racers = self._racers(view)
        if all(racer.load >= self._max_batch for racer in racers):
            return []
        contenders = self._contenders(view, among)
        return assign_races(contenders, racers, self._settings, self._max_batch)

    def note(self, races: Iterable[Race]) -> None:
        """Note that these races are made."""
        for race in races:
            self._races.setdefault(race.id, {})[race.drafting.drafter] = race.to_engine

    def _racers(self, view: RolloutView) -> list[Racer]:
        """Engines with races only, whether they are there by now or not, or with nothing."""
        raced: dict[int, dict[RequestId, str]] = {}
        for id, by_drafter in self._races.items():
            for drafter, engine in by_drafter.items():
                raced.setdefault(engine, {})[id] = drafter
        racers = []
        for engine in view.engines:
            races = raced.get(engine.engine, {})
            if engine.progress.keys() <= races.keys():
                drafter = next(iter(races.values()), None)
                racers.append(Racer(engine.engine, drafter, len(races), engine.node_id))
        return racers

    def _contenders(self, view: RolloutView, among: Container[RequestId] | None) -> list[Contender]:
        where: dict[RequestId, list[EngineView]] = {}
        for engine in view.engines:
            for id in engine.progress:
                if among is None or id in among:
                    where.setdefault(id, []).append(engine)
        generated = {id: max(e.progress[id] for e in engines) for id, engines in where.items()}
        to_come = self._to_come(generated) if self._to_come else dict.fromkeys(generated, 0.0)
        return [self._contender(id, engines, to_come[id]) for id, engines in where.items()]

    def _contender(
        self, id: RequestId, engines: Sequence[EngineView], num_tokens: float
    ) -> Contender:
        """`num_tokens`: those to come."""
        races = self._races.get(id, {})
        raced = {engine: drafter for drafter, engine in races.items()}
        told = {engine.engine: engine.drafting.get(id) for engine in engines}
        gone = self._conceded.get(id, {})
        acceptances = [a for p in told.values() if (a := request_acceptance(p)) is not None]
        gains = [_tokens_per_step(p) for p in told.values()]
        drafters = {_drafter(p, raced.get(e, self._initial)) for e, p in told.items()}
        drafters |= set(gone.values())
        return Contender(
            id,
            max(acceptances, default=None),
            frozenset(d for d in drafters if d is not None) | races.keys(),
            frozenset(told),
            frozenset(engine.node_id for engine in engines),
            num_tokens / max(gains),
        )


def _tokens_per_step(told: DraftProgress | None) -> float:
    """Expected of a verification; 1 where none has told how often drafts are right."""
    acceptance = request_acceptance(told)
    if acceptance is None or told is None or told.setting is None:
        return 1.0
    return expected_tokens(told.setting.window, acceptance)


def _drafter(told: DraftProgress | None, otherwise: str | None) -> str | None:
    """`otherwise`: where the engine has not told."""
    if told is None:
        return otherwise
    return told.setting.drafter if told.setting else None
