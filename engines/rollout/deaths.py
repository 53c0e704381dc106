"""How often an engine may die. Pure."""

from collections import Counter

from engines.rollout.interface import EngineDied, EngineFails


class Deaths:
    """Deaths of the engines of a run."""

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: of one engine."""
        self._max_restarts = max_restarts
        self._num_restarts: Counter[int] = Counter()
        self._worked: set[int] = set()
        """Engines that have finished a rollout since they were last started."""
        self._stillborn: dict[int, str] = {}
        """Error that an engine last died of, if it had finished none."""

    def note_work(self, engine: int) -> None:
        """Note that the engine has finished a rollout."""
        self._worked.add(engine)

    def count(self, death: EngineDied) -> None:
        """Raises the death when there were enough of this engine, or this one will come again."""
        index = death.engine
        root, before = death.root, self._stillborn.pop(index, "")
        if index in self._worked:
            self._worked.discard(index)
        elif root and root == before:
            raise EngineFails(index, f"{root}, before its first rollout, as before", root)
        else:
            self._stillborn[index] = root
        self._num_restarts[index] += 1
        if self._num_restarts[index] > self._max_restarts:
            raise death
