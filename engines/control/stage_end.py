"""Forecast of when a running stage ends, for the people who watch it. Pure.

    view ─outlook─► StepState ─► end of the last request ─► seconds left, which count down

The forecast is the controller's (`Outlook`), from a memory of its own: watching changes no move. It
assumes that no request is moved or deferred.
"""

import math
from dataclasses import dataclass

from refrain.engines.control.outlook import Outlook
from refrain.engines.rollout.moves import RolloutView

EVERY_S = 1.0
"""Least seconds between two forecasts."""
MAX_REQUESTS = 2048
"""Most unfinished requests of a forecast. It blocks the event loop, for about 8 ms with so many."""


@dataclass
class StageEnd:
    """The predicted end of one stage."""

    outlook: Outlook
    _looked_s: float = -math.inf
    """When the last view was read, in seconds since the stage began."""
    _end_s: float | None = None
    """The predicted end, from the same start. None: unknown."""

    def left_s(self, view: RolloutView) -> float | None:
        """Return the seconds until the stage ends, or None while nobody can tell."""
        if view.elapsed_s >= self._looked_s + EVERY_S:
            self._looked_s = view.elapsed_s
            state = self.outlook.forecast(view) if self._can_forecast(view) else None
            self._end_s = view.elapsed_s + state.end_s if state else None
        return None if self._end_s is None else max(0.0, self._end_s - view.elapsed_s)

    def _can_forecast(self, view: RolloutView) -> bool:
        """Return whether lengths are known, and engines have all of the few unfinished requests.
        Other requests wait for an engine that is still at an earlier stage."""
        num_unfinished = view.num_rollouts - view.num_finished
        if not self.outlook.remaining.is_known or num_unfinished > MAX_REQUESTS:
            return False
        return len({id for engine in view.engines for id in engine.progress}) == num_unfinished
