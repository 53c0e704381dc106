"""Free engines race the last requests with other drafters (SpecActor, Algorithm 3). Pure.

    free engine ──argmin_d |W_d|──► one draft method ◄── requests, those that end last first,
                                                         while load < b_max

W_d: the engines that race with method d now, including those with room to spare. The request that
is likely to end last gets all methods that it lacks, as far as there is room. Then the next request
gets them. A raced request stays where it is, and the first of its copies to finish counts. Once a
copy is clearly ahead, the request leaves its first engine, whose batch then ends sooner.

Deviations:
- If a prompt's lengths in its last epoch are known, the request with the most verifications to come
  ends last. So a nearly finished request is not raced because of a low acceptance. Without lengths,
  the request with the lowest acceptance ends last, as in the paper.
- A copy never has a drafter that the request already has. So a free engine gets no method that
  every request has.
- A raced request has the best acceptance of its copies, because that copy sets its pace. A request
  without a known acceptance comes last. If lengths are known, it counts as accepting no drafts.
- The race's setting says whether it is coupled or decoupled. If decoupled, a free engine stands for
  a drafter and its verifier. Drafters are not packed onto existing ones.
- Among methods with equally few engines, a free engine takes the first. The caller orders them by
  expected gain.
- W_d leaves out the engines on which the rollout began with d: all engines began with one method.
- Among engines with room, a request goes to one on its own node: its keys and values go along.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engines.latency.expectation import expected_tokens
from engines.rollout.moves import Concede, EngineView, Race, RolloutView
from engines.specactor.ladder import request_acceptance
from schemas.rollout import DraftProgress, DraftSetting, RequestId

TokensToCome = Callable[[Mapping[RequestId, int]], Mapping[RequestId, float]]
"""Maps response tokens so far, by request, to the expected tokens to come."""
LEAD_TOKENS = 512
"""Response tokens for a clear lead. It is large because engines report at different times."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An unfinished request."""

    id: RequestId
    acceptance: float | None
    """Probability that a draft token is accepted. None until something is verified."""
    drafters: frozenset[str]
    """Drafters that it has on any engine."""
    engines: frozenset[int]
    """Engines that it is on."""
    nodes: frozenset[str | None] = frozenset()
    """Nodes of these engines."""
    steps_to_come: float = 0.0
    """Expected verifications until it ends. 0 for all requests if no lengths are known."""


@dataclass(frozen=True, slots=True)
class Racer:
    """An engine that only races, or is free to."""

    engine: int
    drafter: str | None
    """Drafter that it races with. None: it has no requests and no method yet."""
    load: int
    """Number of its requests."""
    node: str | None = None
    """Its node. None: unknown."""


def assign_races(
    contenders: Sequence[Contender],
    racers: Sequence[Racer],
    settings: Mapping[str, DraftSetting],
    max_batch: int,
) -> list[Race]:
    """Return new copies in the order of decision. `max_batch`: b_max, most requests that an engine
    verifies at once. Ties go to the first drafter, the lower engine, the lower id."""
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
    """Return the method of each engine, in ascending order of engines (lines 1-3). A new one gets
    the method with the fewest engines, among the methods that some request lacks."""
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
    """The policy of one generation stage. It remembers its races, because a view may lag behind."""

    def __init__(
        self,
        methods: Sequence[DraftSetting],
        *,
        initial: str | None,
        max_batch: int,
        to_come: TokensToCome | None = None,
    ) -> None:
        """Take the settings of the stage.

        `methods`: one setting for each drafter to race with. `initial`: the drafter that requests
        have until an engine reports another. `to_come`: None if no lengths are known. Raise
        ValueError if two methods share a drafter or `max_batch` is below 1.
        """
        self._settings = {setting.drafter: setting for setting in methods}
        if len(self._settings) < len(methods) or max_batch < 1:
            raise ValueError(
                f"give one setting of each drafter and a batch of at least 1: {methods}"
            )
        self._initial, self._max_batch, self._to_come = initial, max_batch, to_come
        self._races: dict[RequestId, dict[str, int]] = {}
        """Engine of each copy of the raced requests, by drafter."""
        self._conceded: dict[RequestId, dict[int, str | None]] = {}
        """Drafter of a raced request on each engine that it was withdrawn from."""

    def decide(self, view: RolloutView) -> list[Race | Concede]:
        races = self.propose(view)
        self.note(races)
        return [*races, *self.concede(view)]

    def concede(self, view: RolloutView) -> list[Concede]:
        """Withdraw requests from the engines they began on, if a copy is clearly ahead."""
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
        """Return the engines that have the request and keep it."""
        gone = self._conceded.get(id, {})
        return {i: e for i, e in by_engine.items() if id in e.progress and i not in gone}

    def propose(self, view: RolloutView, among: Container[RequestId] | None = None) -> list[Race]:
        """Return races. Call `note` for those that are made. `among`: requests that may race."""
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
        """Record that these races are made."""
        for race in races:
            self._races.setdefault(race.id, {})[race.drafting.drafter] = race.to_engine

    def _racers(self, view: RolloutView) -> list[Racer]:
        """Return the engines that have nothing but races. A race may not have arrived yet."""
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
        """Return a request that may be raced. `num_tokens`: expected tokens to come."""
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
    """Return expected tokens per verification. 1 while the acceptance is unknown."""
    acceptance = request_acceptance(told)
    if acceptance is None or told is None or told.setting is None:
        return 1.0
    return expected_tokens(told.setting.window, acceptance)


def _drafter(told: DraftProgress | None, otherwise: str | None) -> str | None:
    """Return the reported drafter. `otherwise`: if the engine has not reported."""
    if told is None:
        return otherwise
    return told.setting.drafter if told.setting else None
