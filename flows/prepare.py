"""Prepare a run before it starts: plan it, print the plan, make way for it.

training_plan, evaluation_plan   read only, change nothing on disk
make_way                         makes the first change: deletes an earlier run, for --overwrite
"""

import re
from typing import TYPE_CHECKING, Any

from refrain.engines.data.hub import with_local_model
from refrain.flows.environment import set_services, use_embedded_services
from refrain.flows.evaluation_config import EvaluationSubject, find_subject
from refrain.schemas.config import TrainConfig
from refrain.schemas.evaluation import EvaluateConfig
from refrain.tasks.run.resuming import check_mirror, renew_store
from refrain.tasks.run.run_dir import delete_run

if TYPE_CHECKING:
    from refrain.tasks.run.plan import RunPlan


def training_plan(
    config: TrainConfig,
    resume: bool,
    *,
    overwrite: bool = False,
    new_store: bool = False,
    gpus: str | None = None,
) -> "RunPlan":
    """Plan a training run, see `plan_run`. Download its model if it is a name on the Hub. Raise
    ValueError for bad input."""
    # Download first, because the environment of a run is offline.
    config = with_local_model(config)
    set_services(config.runs_dir)
    from refrain.tasks.run.plan import plan_run

    return plan_run(config, resume, overwrite=overwrite, new_store=new_store, gpus=gpus)


def evaluation_plan(
    config: EvaluateConfig, resume: bool, *, overwrite: bool = False
) -> "tuple[EvaluationSubject, RunPlan]":
    """Find the model to evaluate, and plan the run that does it. Raise ValueError for bad input."""
    subject = find_subject(config)
    set_services(config.runs_dir)
    from refrain.tasks.run.plan import plan_evaluation

    return subject, plan_evaluation(subject.config, resume, overwrite=overwrite)


def make_way(plan: "RunPlan") -> None:
    """Delete an earlier run or rename its store, if requested. Make Prefect's directory.

    Raise ValueError before the deletion when the mirror has copies of that run's checkpoints.
    """
    if plan.gpu_split:
        print(plan.gpu_split)
    if plan.overwrites:
        check_mirror(plan.config, resume=False, changes=[])
        delete_run(plan.config.run_dir)
    if plan.renews_store:
        for moved in renew_store(plan.config.run_dir):
            print(f"kept the former store as {moved}")
    use_embedded_services(plan.config.runs_dir)


def print_plan(plan: "RunPlan") -> None:
    """Print each part of a plan, what changed in a resumed run, and the memory of each place."""
    from refrain.engines.reports.plan import print_needs

    for change in plan.changes:
        print(f"resumed with {change}")
    for note in plan.notes:
        print(note)
    datasets, steps = plan.inputs.datasets.items(), plan.inputs.loader.num_steps
    sizes = ", ".join(f"{len(data.prompts)} {split}" for split, data in datasets)
    print(f"{plan.config.name}: {sizes} prompts, {steps} steps. All is well.")
    for line in plan.inputs.loader.mixture.lines():
        print(line)
    for name, value in parts(plan).items():
        print(f"  {name:<12}{value}")
    for warning in plan.inputs.warnings:
        print(warning)
    if plan.config.drafting.enabled:
        data = " ".join(str(path) for path in plan.config.data.train_files)
        print(
            "Drafts: their speedup depends on how random the policy is. The first step's log "
            f"shows it. To measure it now: refrain bench real {plan.config.model.path} {data}"
        )
    print_needs(plan.memory.needs)
    print(plan.memory.says)


def parts(plan: "RunPlan") -> dict[str, str]:
    """Return the parts of a plan and their values, to read."""
    config, addresses, rollout = plan.config, plan.addresses, plan.config.rollout
    num_ranks = config.trainer.num_processes
    where = "takes turns with the engines" if config.takes_turns else "apart from the engines"
    drafters = [f"{model.num_engines} of {model.name}" for model in config.specactor.draft_models]
    mlflow, prefect = addresses.mlflow, addresses.prefect
    return {
        "run": f"{config.run_dir}, {_start(plan)}",
        "model": f"{config.model.path} in {config.model.dtype}",
        "steps": f"{config.prompts_per_step} x {rollout.group_size}, staleness {config.staleness}",
        "engines": f"{rollout.num_engines} of TP {rollout.tp_degree}",
        "drafters": ", ".join(drafters) or "no draft models",
        "trainer": f"{num_ranks} {'rank' if num_ranks == 1 else 'ranks'}, {where}",
        "profile": config.profile or "none: engines measure their steps",
        **_environment(plan),
        "store": str(addresses.store),
        "Ray": "this machine" if addresses.ray == "local" else addresses.ray,
        "MLflow": _without_password(mlflow) if mlflow else f"files in {config.runs_dir}",
        "Prefect": _without_password(prefect) if prefect else "a server of this run",
    }


def _environment(plan: "RunPlan") -> dict[str, str]:
    environment, setup = plan.config.environment, plan.inputs.environment
    if environment is None or setup is None:
        return {}
    kind = environment.name or ("a class" if setup.has_class else "tools alone")
    schemas: list[dict[str, Any]] = setup.tools
    tools = [schema["function"]["name"] for schema in schemas]
    limits = (
        f"{environment.max_turns} turns, {environment.max_calls} calls a turn, "
        f"{environment.max_observation_tokens} tokens an observation, "
        f"{environment.timeout_s:g} s a call"
    )
    shown = f"{environment.path} ({kind}), tools: {', '.join(tools) or 'none'}, at most {limits}"
    return {"environment": f"{shown}; on_error: {environment.on_error}"}


def _start(plan: "RunPlan") -> str:
    if plan.overwrites:
        return "replaces an earlier run"
    if not plan.resume:
        return "new"
    checkpoint = plan.resumption.checkpoint
    return f"resumes from {checkpoint.name if checkpoint else 'its beginning'}"


def _without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)
