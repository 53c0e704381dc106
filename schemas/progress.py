"""Progress of a run, which the run writes for everybody who watches. Times are Unix times."""

from enum import StrEnum

from pydantic import NonNegativeFloat, NonNegativeInt

from refrain.schemas.base import Frozen


class Ending(StrEnum):
    """How a run's process ended."""

    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"
    """Interrupted or cancelled."""


class Rolling(Frozen):
    """A running generation stage."""

    label: str
    """The step, as `split step n`."""
    num_finished: NonNegativeInt
    num_rollouts: NonNegativeInt
    num_in_flight_tokens: NonNegativeInt
    """Response tokens so far of unfinished rollouts."""
    num_finished_tokens: NonNegativeInt
    """Response tokens of rollouts that finished in this process."""
    acceptance_rate: NonNegativeFloat | None
    """Accepted / drafted tokens of finished rollouts. None without drafts."""
    num_busy_engines: NonNegativeInt
    """Engines with unfinished rollouts of this stage."""
    num_engines: NonNegativeInt
    elapsed_s: NonNegativeFloat
    """Seconds since the first engine began."""
    left_s: NonNegativeFloat | None = None
    """Predicted seconds until the stage ends. None: unknown."""

    @property
    def tokens_per_second(self) -> float:
        num_tokens = self.num_in_flight_tokens + self.num_finished_tokens
        return num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def idle_share(self) -> float:
        """Share of the engines that have nothing to do now."""
        return 1.0 - self.num_busy_engines / self.num_engines


class RunProgress(Frozen):
    """Current or last state of a run (`progress.json`)."""

    num_steps: NonNegativeInt
    """Steps of the whole run."""
    phase: str = ""
    rolling: Rolling | None = None
    """The running generation stage. None between stages."""
    first_started_s: NonNegativeFloat
    """Start of the run's first process."""
    started_s: NonNegativeFloat
    """Start of this process."""
    earlier_s: NonNegativeFloat = 0.0
    """Seconds that earlier processes of the run took."""
    updated_s: NonNegativeFloat
    ending: Ending | None = None
    """How the process ended. None while it runs, and after it was killed."""
    error: str | None = None
    """Error that the run failed with."""
    failures: dict[str, NonNegativeInt] = {}
    """Number of failed records by kind; they do not end the run (`engines.failures`)."""

    @property
    def wall_s(self) -> float:
        """Seconds that all processes of the run took, until the last update."""
        return self.wall_by(self.updated_s)

    def wall_by(self, now_s: float) -> float:
        """Seconds that all processes took until this Unix time. If the clock was set back, this
        process counts 0."""
        return self.earlier_s + max(0.0, now_s - self.started_s)
