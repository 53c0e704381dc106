"""Limit on the restarts of each engine. Pure."""

from collections import Counter

from refrain.engines.rollout.interface import EngineDied, EngineFails

MAX_RESTARTS = 10
"""Restarts of an engine that a run allows. Then the run goes on from its last checkpoint."""
MAX_IN_VAIN = 3
"""Restarts in a row without a rollout. A fourth one would not help either."""


class Deaths:
    """Counter of the deaths of a run's engines."""

    def __init__(self, max_restarts: int = MAX_RESTARTS) -> None:
        """`max_restarts`: limit for each engine."""
        self._max_restarts = max_restarts
        self._num_restarts: Counter[int] = Counter()
        self._num_in_vain: Counter[int] = Counter()
        """Restarts of each engine since its last rollout."""
        self._worked: set[int] = set()
        """Engines that have finished a rollout since they were last started."""
        self._stillborn: dict[int, str] = {}
        """Error of the last death of each engine that died before its first rollout."""

    def note_work(self, engine: int) -> None:
        """Note that the engine has finished a rollout."""
        self._worked.add(engine)

    def count(self, death: EngineDied) -> None:
        """Count a death. Raise it if the engine has no restarts left, or was restarted three times
        without a rollout since. Raise `EngineFails` if the engine died of the same error twice in a
        row before its first rollout."""
        index = death.engine
        root, before = death.root, self._stillborn.pop(index, "")
        if index in self._worked:
            self._worked.discard(index)
            self._num_in_vain[index] = 0
        elif root and root == before:
            raise EngineFails(index, f"{root}, twice in a row before its first rollout", root)
        else:
            self._stillborn[index] = root
        self._num_restarts[index] += 1
        self._num_in_vain[index] += 1
        if self._num_restarts[index] > self._max_restarts or self._num_in_vain[index] > MAX_IN_VAIN:
            raise death
