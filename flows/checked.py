"""A training run that may start: everything that can be refused has been looked at.

check_training      reads, and changes nothing on disk
CheckedTraining.make_way     the first change: an earlier run is deleted, where that is asked for
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.environment import set_services, use_embedded_services
from schemas.config import TrainConfig
from schemas.resume import SettingChange
from tasks.run.resuming import check_mirror, check_resumable, renew_store
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
    notes: Sequence[str]
    """Sentences about parts of a resumed run that it goes on without."""
    overwrites: bool
    """Whether an earlier run of this name is to be deleted."""
    renews_store: bool
    """Whether a run that is resumed is to get an empty store."""

    def make_way(self) -> None:
        """Delete an earlier run or rename its store, where that is asked for, and make the places
        of Prefect. Raises ValueError for copies of that run's checkpoints elsewhere, before
        anything is deleted."""
        if self.overwrites:
            check_mirror(self.config, resume=False, changes=[])
            delete_run(self.config.run_dir)
        if self.renews_store:
            for moved in renew_store(self.config.run_dir):
                print(f"the former store is kept: {moved}")
        use_embedded_services(self.config.runs_dir)

    def tell(self) -> None:
        """Print it."""
        from engines.reports.plan import print_plan

        for change in self.changes:
            print(f"resumed with {change}")
        for note in self.notes:
            print(note)
        datasets = self.inputs.datasets.items()
        sizes = ", ".join(f"{len(data.prompts)} {split}" for split, data in datasets)
        steps = self.inputs.loader.num_steps
        print(f"{self.config.name}: {sizes} prompts, {steps} steps. All is well.")
        for warning in self.inputs.warnings:
            print(warning)
        if self.config.drafting.enabled:
            data = " ".join(str(path) for path in self.config.data.train)
            print(
                "Drafts: how much they bring depends on how random the policy is. The first step's "
                f"log says; to measure it now: refrain bench real {self.config.model.path} {data}"
            )
        print_plan(self.plan.needs)
        print(self.plan.says)


def check_training(
    config: TrainConfig,
    resume: bool,
    overwrite: bool,
    gpus: str | None = None,
    *,
    new_store: bool = False,
) -> CheckedTraining:
    """Check everything and change nothing. `gpus`: see `plan_training`. `new_store`: the run that
    is resumed is to get an empty one. What is planned of the config itself is in the one that is
    returned. Raises ValueError."""
    if new_store and not resume:
        raise ValueError("--new-store is for a run that is resumed: give --resume RUN")
    set_services(config.runs_dir)
    from tasks.run.dated import dated
    from tasks.run.machine import plan_training
    from tasks.run.preflight import read_inputs
    from tasks.run.split import with_gpu_split

    config = dated(with_gpu_split(config), resume)
    overwrites = overwrite and not resume
    changes: list[SettingChange] = []
    if overwrites:
        check_deletable(config.run_dir)
    else:
        changes = check_run_dir(config, resume)
        refuse_live(config.run_dir)
    inputs = read_inputs(config)
    plan = plan_training(config, gpus)
    notes = check_resumable(config, new_store=new_store).notes if resume else ()
    return CheckedTraining(config, inputs, plan, changes, notes, overwrites, new_store)
