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
- If the race's drafter drafts ahead, a free engine stands for a drafter and its verifier. Drafters
  are not packed onto existing ones.
- Among methods with equally few engines, a free engine takes the first. The caller orders them by
  expected gain.
- W_d leaves out the engines on which the rollout began with d: all engines began with one method.
- Among engines with room, a request goes to one on its own node: its keys and values go along.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from refrain.engines.rollout.moves import Concede, Race, RolloutView
from refrain.engines.specactor.contenders import Contender, Contenders, Raced, TokensToCome
from refrain.schemas.rollout import DraftSetting, RequestId

LEAD_TOKENS = 512
"""Response tokens for a clear lead. It is large because engines report at different times."""


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
    first: Callable[[Set[str]], Iterable[Contender]],
    lacked: Set[str],
    racers: Sequence[Racer],
    settings: Mapping[str, DraftSetting],
    max_batch: int,
) -> list[Race]:
    """Return new copies in the order of decision. Ties go to the first drafter, the lower engine.

    `first`: returns the requests, those that end last first. It gets the methods that still have
    room, and may end when no request lacks one of these. `lacked`: methods that some request lacks.
    `max_batch`: b_max, most requests that an engine verifies at once.
    """
    node_of = {racer.engine: racer.node for racer in racers}
    methods = _methods(lacked, racers, list(settings))
    room = {racer.engine: max_batch - racer.load for racer in racers}
    by_drafter = {d: [engine for engine in methods if methods[engine] == d] for d in settings}
    wanted = {d for d, engines in by_drafter.items() if any(room[e] > 0 for e in engines)}
    races = []
    for contender in first(wanted) if wanted else ():
        for drafter in [d for d in settings if d in wanted and d not in contender.drafters]:
            free = [e for e in by_drafter[drafter] if room[e] > 0]
            others = [e for e in free if e not in contender.engines]
            if not others:
                continue
            engine = min(others, key=lambda e: node_of[e] not in contender.nodes)
            races.append(Race(contender.id, engine, settings[drafter]))
            room[engine] -= 1
            if free == [engine] and not room[engine]:
                wanted.discard(drafter)
        if not wanted:
            break
    return races


def _methods(lacked: Set[str], racers: Sequence[Racer], drafters: Sequence[str]) -> dict[int, str]:
    """Return the method of each engine, in ascending order of engines (lines 1-3). A new one gets
    the method with the fewest engines, among the methods that some request lacks."""
    new = [drafter for drafter in drafters if drafter in lacked]
    num_engines = {d: sum(racer.drafter == d for racer in racers) for d in drafters}
    methods = {}
    for racer in sorted(racers, key=lambda racer: racer.engine):
        if racer.drafter is not None:
            methods[racer.engine] = racer.drafter
        elif new:
            drafter = min(new, key=num_engines.__getitem__)
            num_engines[drafter] += 1
            methods[racer.engine] = drafter
    return methods


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
        self._max_batch = max_batch
        self._contenders = Contenders(initial, to_come)
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
        self._contenders.update(view)
        moves = []
        for id, races in self._races.items():
            gone = self._conceded.get(id, {})
            holders = {i: e for i, e in self._contenders.holders(id).items() if i not in gone}
            raced = [engine.progress[id] for i, engine in holders.items() if i in races.values()]
            for index, engine in holders.items():
                trails = raced and engine.progress[id] + LEAD_TOKENS <= max(raced)
                if index not in races.values() and trails:
                    drafter = self._contenders.drafter(engine, id)
                    self._conceded.setdefault(id, {})[index] = drafter
                    moves.append(Concede(id, index))
        return moves

    def propose(self, view: RolloutView, among: Container[RequestId] | None = None) -> list[Race]:
        """Return races. Call `note` for those that are made. `among`: requests that may race."""
        if not self._races and all(engine.progress for engine in view.engines):
            return []
        self._contenders.update(view)
        for id in [id for id in self._races if id not in self._contenders]:
            del self._races[id]
            self._conceded.pop(id, None)
        racers = self._racers(view)
        if all(racer.load >= self._max_batch for racer in racers):
            return []
        order = self._contenders.order({id: self._raced(id) for id in self._races})
        first, lacked = partial(order.first, among=among), order.lacked(self._settings)
        return assign_races(first, lacked, racers, self._settings, self._max_batch)

    def _raced(self, id: RequestId) -> Raced:
        copies = {engine: drafter for drafter, engine in self._races[id].items()}
        return Raced(copies, self._conceded.get(id, {}).values())

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
