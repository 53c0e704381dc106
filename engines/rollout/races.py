"""Books of a generation stage's races: who began with how much, and what came of it. Pure.

    begin ─► win ─► lose, once for each other copy ─► check, where one had finished too
      ├────► drop, when a copy's engine dies; the last copy is raced no more
      ├────► concede, when a copy is ended as another leads; the last one has won
      ├────► leave, when a copy meets another one that has more
      └────► move, when a copy goes to another engine

Where the copies are, the tracked engines know.
"""

from dataclasses import dataclass, field

from engines.rollout.interface import Finished
from schemas.rollout import RequestId


@dataclass(slots=True)
class RunningRace:
    """One request on several engines."""

    origin: int
    """Engine that had the request when it was first raced."""
    began_tokens: dict[int, int]
    """Response tokens of each copy when it joined the race, by engine."""
    winner: bytes | None = None
    """Digest of the first copy's tokens."""


@dataclass(slots=True)
class Races:
    """Races of one generation stage."""

    num_raced: int = 0
    """Copies that were begun: a request on three engines counts twice."""
    num_with_kv: int = 0
    """Copies among these that took their keys and values along."""
    num_won: int = 0
    """Requests that finished first elsewhere than on the engine that they were raced from."""
    wasted_tokens: int = 0
    """Tokens that losers generated since they joined, as far as it is known."""
    num_diverged: int = 0
    """Copies that finished too late, and with other tokens."""
    _races: dict[RequestId, RunningRace] = field(default_factory=dict)

    def begin(
        self, id: RequestId, origin: int, target: int, num_tokens: int, *, with_kv: bool = False
    ) -> None:
        """Note a new copy. `num_tokens`: response tokens that it begins with; `with_kv`: and with
        their keys and values."""
        race = self._races.setdefault(id, RunningRace(origin, {origin: num_tokens}))
        race.began_tokens[target] = num_tokens
        self.num_raced += 1
        self.num_with_kv += with_kv

    def win(self, rollout: Finished) -> bool:
        """Note that a rollout is the first of its copies; False when it was not raced."""
        race = self._races.get(rollout.id)
        if race is None:
            return False
        race.winner = rollout.token_digest
        self.num_won += rollout.engine != race.origin
        return True

    def lose(self, id: RequestId, engine: int, num_tokens: int) -> None:
        """Note that a copy lost. `num_tokens`: response tokens that it had."""
        began_tokens = self._races[id].began_tokens[engine]
        self.wasted_tokens += max(0, num_tokens - began_tokens)

    def drop(self, id: RequestId, engine: int) -> None:
        """A copy died. What a death costs is not wasted by the race."""
        race = self._races[id]
        del race.began_tokens[engine]
        if len(race.began_tokens) == 1:
            del self._races[id]

    def leave(self, id: RequestId, engine: int, num_tokens: int) -> None:
        """A copy ended, in favour of one that has come to the same GPUs."""
        self.lose(id, engine, num_tokens)
        self.drop(id, engine)

    def concede(self, id: RequestId, engine: int, num_tokens: int) -> None:
        """A copy ended, as another leads; where one is left, that has won. `num_tokens`: as for
        `lose`."""
        race = self._races[id]
        self.lose(id, engine, num_tokens)
        del race.began_tokens[engine]
        if len(race.began_tokens) == 1:
            self.num_won += race.origin not in race.began_tokens
            del self._races[id]

    def has(self, id: RequestId, engine: int) -> bool:
        """Whether a copy of the race is there."""
        race = self._races.get(id)
        return race is not None and engine in race.began_tokens

    def move(self, id: RequestId, engine: int, target: int) -> None:
        """A copy goes on elsewhere, if this is one; the origin's remains the origin's."""
        race = self._races.get(id)
        if race is None:
            return
        race.began_tokens[target] = race.began_tokens.pop(engine)
        if race.origin == engine:
            race.origin = target

    def check(self, rollout: Finished) -> None:
        """One that does not count, if it lost a race, should have the winner's tokens: only then
        does it not matter who comes first. In bfloat16 a near-tie may flip (exact sampling)."""
        race = self._races.get(rollout.id)
        if race and race.winner:
            self.num_diverged += rollout.token_digest != race.winner
