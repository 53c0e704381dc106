"""A training run that may start: everything that can be refused has been looked at."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.environment import use_embedded_services
from schemas.config import TrainConfig
from schemas.resume import SettingChange
from tasks.run.run_dir import check_run_dir, delete_run

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
    """Check everything, and delete an earlier run where that is asked for. `gpus`: see
    `plan_training`. What is planned of the config itself is in the one that is returned. Raises
    ValueError."""
    use_embedded_services(config.runs_dir)
    from tasks.run.machine import plan_training
    from tasks.run.preflight import read_inputs
    from tasks.run.split import with_gpu_split

    config = with_gpu_split(config)
    inputs = read_inputs(config)
    plan = plan_training(config, gpus)
    if overwrite and not resume:
        delete_run(config.run_dir)
    return CheckedTraining(config, inputs, plan, check_run_dir(config, resume))
