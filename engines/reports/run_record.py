"""Record of a run from its directory, alive or not. Pure; `tasks.run.record` reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from schemas.config import TrainConfig
from schemas.progress import Ending, RunProgress
from schemas.step import RunSummary, StepReport


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Interrupted, cancelled or killed: it can be resumed."""
    FAILED = "failed"
    """Ended with an error; it can be resumed once that is mended."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run."""

    run_dir: Path
    live: bool
    """A process holds it."""
    config: TrainConfig | None
    """None when it cannot be read."""
    progress: RunProgress | None
    """None of a run that an earlier version made."""
    summary: RunSummary | None
    """None before the end, and when it cannot be read."""
    steps: Sequence[StepReport]
    """Finished ones, in order."""
    checkpoint: Path | None
    """The last one."""
    mlflow_run: str | None
    modified_s: float
    """Unix time of its last start, when its config was written."""
    troubles: Sequence[str] = ()
    """Complaints about parts of the directory that cannot be read."""

    @property
    def name(self) -> str:
        return self.run_dir.name

    @property
    def state(self) -> RunState:
        if self.live:
            return RunState.RUNNING
        ending = self.progress.ending if self.progress else None
        if self.summary or ending is Ending.FINISHED:
            return RunState.FINISHED
        return RunState.FAILED if ending is Ending.FAILED else RunState.STOPPED

    @property
    def num_steps(self) -> int | None:
        """Steps of the whole run; None where it is not known."""
        if self.progress:
            return self.progress.num_steps
        return self.summary.steps if self.summary else None

    @property
    def last_step(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def started_s(self) -> float:
        """Unix time of its first start; of its last one for a run that an earlier version made."""
        return self.progress.first_started_s if self.progress else self.modified_s

    def wall_s(self, now_s: float) -> float | None:
        """Seconds that its processes took; None where it is not known."""
        if self.progress is None:
            return self.summary.wall_s if self.summary else None
        if self.live:
            return self.progress.earlier_s + now_s - self.progress.started_s
        return self.progress.wall_s

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step, in order."""
        return [step.reward_mean for step in self.steps]
