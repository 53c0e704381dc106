"""How far a run is, as it writes it down for whoever watches. Times are Unix times."""

from enum import StrEnum

from pydantic import NonNegativeFloat, NonNegativeInt

from schemas.base import Frozen


class Ending(StrEnum):
    """How a run's process left."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """Interrupted or cancelled."""


class Rolling(Frozen):
    """A generation stage under way."""

    label: str
    """The step, as `split step n`."""
    num_finished: NonNegativeInt
    num_rollouts: NonNegativeInt
    num_in_flight_tokens: NonNegativeInt
    """Response tokens so far of rollouts that go on."""
    num_finished_tokens: NonNegativeInt
    """Response tokens of those that finished in this process."""
    acceptance_rate: NonNegativeFloat | None
    """Accepted over drafted tokens of those that finished; None where nothing was drafted."""
    num_busy_engines: NonNegativeInt
    """With unfinished rollouts of the phase."""
    num_engines: NonNegativeInt
    elapsed_s: NonNegativeFloat
    """Since the first engine began."""

    @property
    def tokens_per_second(self) -> float:
        num_tokens = self.num_in_flight_tokens + self.num_finished_tokens
        return num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def idle_share(self) -> float:
        """Of the engines, at this moment."""
        return 1.0 - self.num_busy_engines / self.num_engines


class RunProgress(Frozen):
    """What a run does now, or did last (`progress.json`)."""

    num_steps: NonNegativeInt
    """Of the whole run."""
    phase: str = ""
    rolling: Rolling | None = None
    """None between generation stages."""
    first_started_s: NonNegativeFloat
    """Of the first process of the run."""
    started_s: NonNegativeFloat
    """Of this process."""
    earlier_s: NonNegativeFloat = 0.0
    """Seconds that earlier processes of the run took."""
    updated_s: NonNegativeFloat
    ending: Ending | None = None
    """None while it goes on, and when it was killed."""
    error: str | None = None
    """What it failed with."""

    @property
    def wall_s(self) -> float:
        """Of all processes of the run, to the last update."""
        return self.earlier_s + self.updated_s - self.started_s
