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
    """Response tokens of rollouts that finished in this process."""
    acceptance_rate: NonNegativeFloat | None
    """Accepted over drafted tokens of those that finished; None where nothing was drafted."""
    num_busy_engines: NonNegativeInt
    """Engines with unfinished rollouts of this generation stage."""
    num_engines: NonNegativeInt
    elapsed_s: NonNegativeFloat
    """Seconds since the first engine began."""

    @property
    def tokens_per_second(self) -> float:
        num_tokens = self.num_in_flight_tokens + self.num_finished_tokens
        return num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the engines that have nothing to do at this moment."""
        return 1.0 - self.num_busy_engines / self.num_engines


class RunProgress(Frozen):
    """Present state of a run, or its last one (`progress.json`)."""

    num_steps: NonNegativeInt
    """Steps of the whole run."""
    phase: str = ""
    rolling: Rolling | None = None
    """The generation stage under way; None between stages."""
    first_started_s: NonNegativeFloat
    """Start of the run's first process; Unix time."""
    started_s: NonNegativeFloat
    """Start of this process; Unix time."""
    earlier_s: NonNegativeFloat = 0.0
    """Seconds that earlier processes of the run took."""
    updated_s: NonNegativeFloat
    ending: Ending | None = None
    """How the process left; None while it goes on, and when it was killed."""
    error: str | None = None
    """Error that the run failed with."""
    failures: dict[str, NonNegativeInt] = {}
    """Failures of its record by kind, which ended nothing (`engines.failures`)."""

    @property
    def wall_s(self) -> float:
        """Seconds that all processes of the run took, to the last update."""
        return self.wall_by(self.updated_s)

    def wall_by(self, now_s: float) -> float:
        """The same to this Unix time. A clock that was set back since counts nothing."""
        return self.earlier_s + max(0.0, now_s - self.started_s)
