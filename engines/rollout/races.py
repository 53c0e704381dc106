"""Record of a generation stage's races: the tokens of each copy at its start, and the results.
Pure.

    begin ─► win ─► lose, once for each other copy ─► check, if a losing copy finished too
      ├────► drop, when a copy's engine dies; the last copy is no longer raced
      ├────► concede, when a policy ends a copy because another leads; the last copy wins
      ├────► leave, when a reshape puts two copies in one pool: ends the one with fewer tokens
      └────► move, when a copy goes to another engine

`TrackedEngine.unfinished` says where the copies are.
"""

from dataclasses import dataclass, field

from refrain.engines.rollout.interface import Finished
from refrain.schemas.rollout import RequestId


@dataclass(slots=True)
class RunningRace:
    """One request on several engines."""

    origin: int
    """Engine that had the request when the race began."""
    began_tokens: dict[int, int]
    """Response tokens of each copy when it joined the race, by engine."""
    winner: bytes | None = None
    """Digest of the winning copy's tokens."""


@dataclass(slots=True)
class Races:
    """Races of one generation stage."""

    num_raced: int = 0
    """Number of copies started. A request on three engines counts twice."""
    num_with_kv: int = 0
    """Number of these copies that took keys and values along."""
    num_won: int = 0
    """Number of requests whose winning copy was not on the origin."""
    wasted_tokens: int = 0
    """Tokens that losers generated since they joined, by the last known counts."""
    num_diverged: int = 0
    """Number of losing copies that finished with other tokens than the winner."""
    _races: dict[RequestId, RunningRace] = field(default_factory=dict)

    def begin(
        self, id: RequestId, origin: int, target: int, num_tokens: int, *, with_kv: bool = False
    ) -> None:
        """Note a new copy that begins with `num_tokens` response tokens. `with_kv`: with their keys
        and values."""
        race = self._races.setdefault(id, RunningRace(origin, {origin: num_tokens}))
        race.began_tokens[target] = num_tokens
        self.num_raced += 1
        self.num_with_kv += with_kv

    def win(self, rollout: Finished) -> bool:
        """Note that a rollout is the first of its copies. Return False if it was not raced."""
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
        """Note that a copy's engine died. Its tokens do not count as wasted by the race."""
        race = self._races[id]
        del race.began_tokens[engine]
        if len(race.began_tokens) == 1:
            del self._races[id]

    def leave(self, id: RequestId, engine: int, num_tokens: int) -> None:
        """Note that a copy ended because another copy moved to the same GPUs."""
        self.lose(id, engine, num_tokens)
        self.drop(id, engine)

    def concede(self, id: RequestId, engine: int, num_tokens: int) -> None:
        """Note that a copy ended because another leads. If one copy is left, it wins.
        `num_tokens`: as for `lose`."""
        race = self._races[id]
        self.lose(id, engine, num_tokens)
        del race.began_tokens[engine]
        if len(race.began_tokens) == 1:
            self.num_won += race.origin not in race.began_tokens
            del self._races[id]

    def has(self, id: RequestId, engine: int) -> bool:
        """Whether this engine has a copy of a raced request."""
        race = self._races.get(id)
        return race is not None and engine in race.began_tokens

    def move(self, id: RequestId, engine: int, target: int) -> None:
        """Note that a request moved to another engine, if it is raced. If it moved from the origin,
        the target becomes the origin."""
        race = self._races.get(id)
        if race is None:
            return
        race.began_tokens[target] = race.began_tokens.pop(engine)
        if race.origin == engine:
            race.origin = target

    def check(self, rollout: Finished) -> None:
        """Compare a late rollout with the winner of its race, if there was one. Races are unbiased
        only if all copies have the same tokens. In bfloat16 a near-tie may flip (exact sampling).
        """
        race = self._races.get(rollout.id)
        if race and race.winner:
            self.num_diverged += rollout.token_digest != race.winner
