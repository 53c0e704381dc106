"""A training run that may start: everything that can be refused has been looked at.

check_training      reads, and changes nothing on disk
CheckedTraining.make_way     the first change: an earlier run is deleted, where that is asked for
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.environment import set_services, use_embedded_services
from schemas.config import TrainConfig
from schemas.resume import SettingChange
from tasks.run.run_dir import check_deletable, check_run_dir, delete_run, refuse_live

if TYPE_CHECKING:
    from tasks.run.machine import MemoryPlan
    from tasks.run.preflight import Inputs


@dataclass(frozen=True)
class CheckedTraining:
    """Inputs of a run, and its plan of memory."""

    config: TrainConfig
    inputs: "Inputs"
    plan: "MemoryPlan"
    changes: list[SettingChange]
    """Settings that are others than before, of a run that is resumed."""
    overwrites: bool
    """Whether an earlier run of this name is to be deleted."""

    def make_way(self) -> None:
        """Delete an earlier run, where that is asked for, and make the places of Prefect. Raises
        ValueError for copies of that run's checkpoints elsewhere, before anything is deleted."""
        use_embedded_services(self.config.runs_dir)
        if self.overwrites:
            from tasks.run.live import check_mirror

            check_mirror(self.config, resume=False, changes=[])
            delete_run(self.config.run_dir)

    def tell(self) -> None:
        """Print it."""
        from engines.reports.plan import print_plan

        for change in self.changes:
            print(f"resumed with {change}")
        datasets = self.inputs.datasets.items()
        sizes = ", ".join(f"{len(data.prompts)} {split}" for split, data in datasets)
        steps = self.inputs.loader.num_steps
        print(f"{self.config.name}: {sizes} prompts, {steps} steps. All is well.")
        for warning in self.inputs.warnings:
            print(warning)
        print_plan(self.plan.needs)
        print(self.plan.says)


def check_training(
    config: TrainConfig, resume: bool, overwrite: bool, gpus: str | None = None
) -> CheckedTraining:
    """Check everything and change nothing. `gpus`: see `plan_training`. What is planned of the
    config itself is in the one that is returned. Raises ValueError."""
    set_services(config.runs_dir)
    from tasks.run.machine import plan_training
    from tasks.run.preflight import read_inputs
    from tasks.run.split import with_gpu_split

    config = with_gpu_split(config)
    inputs = read_inputs(config)
    plan = plan_training(config, gpus)
    overwrites = overwrite and not resume
    changes = _check_place(config, resume, overwrites)
    return CheckedTraining(config, inputs, plan, changes, overwrites)


def _check_place(config: TrainConfig, resume: bool, overwrites: bool) -> list[SettingChange]:
    """Settings with which the run goes on otherwise than before."""
    if overwrites:
        check_deletable(config.run_dir)
        return []
    changes = check_run_dir(config, resume)
    refuse_live(config.run_dir)
    return changes
