"""Check a training run completely before it starts.

check_training               reads only, changes nothing on disk
CheckedTraining.make_way     makes the first change: deletes an earlier run, for --overwrite
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
    """A run that passed all checks: its inputs and its memory plan."""

    config: TrainConfig
    inputs: "Inputs"
    plan: "MemoryPlan"
    changes: list[SettingChange]
    """Settings of a resumed run that changed."""
    notes: Sequence[str]
    """Sentences about parts that a resumed run continues without."""
    overwrites: bool
    """Whether to delete an earlier run of this name."""
    renews_store: bool
    """Whether to replace the store of a resumed run (--new-store)."""

    def make_way(self) -> None:
        """Delete an earlier run or rename its store, if requested. Make Prefect's directory.

        Raise ValueError before the deletion when the mirror has copies of that run's checkpoints.
        """
        if self.overwrites:
            check_mirror(self.config, resume=False, changes=[])
            delete_run(self.config.run_dir)
        if self.renews_store:
            for moved in renew_store(self.config.run_dir):
                print(f"kept the former store as {moved}")
        use_embedded_services(self.config.runs_dir)

    def tell(self) -> None:
        """Print the result of the checks and the memory plan."""
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
                "Drafts: their speedup depends on how random the policy is. The first step's log "
                f"shows it. To measure it now: refrain bench real {self.config.model.path} {data}"
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
    """Check everything and change nothing on disk. Raise ValueError.

    `gpus`: see `plan_training`. `new_store`: replace the store of the resumed run. The returned
    config has the planned GPU split and the date.
    """
    if new_store and not resume:
        raise ValueError("--new-store works with --resume only: give --resume RUN too")
    set_services(config.runs_dir)
    from tasks.run.machine import plan_training
    from tasks.run.preflight import read_inputs
    from tasks.run.split import with_gpu_split
    from tasks.run.start_date import dated

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
