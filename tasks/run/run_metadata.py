"""Log facts about a run to MLflow: its environment, data, profile, changes and checkpoints."""

import time
from hashlib import sha256
from pathlib import Path

from prefect.runtime import flow_run as this_flow_run

from refrain.engines.latency.profile_file import find_profile
from refrain.engines.learn.checkpoint import (
    STATE_FILE,
    CheckpointState,
    complete_checkpoints,
    read_state,
)
from refrain.engines.tracking.environment import find_environment
from refrain.engines.tracking.tracker import Tracker
from refrain.schemas.config import TrainConfig
from refrain.schemas.profile import PROFILE_FILE
from refrain.schemas.rollout import Split
from refrain.tasks.run.crashes import read_crashes
from refrain.tasks.run.preflight import Inputs
from refrain.tasks.run.run_dir import CONFIG_FILE, read_changes

CONTENTS = """\
| artifact | content |
|---|---|
| `config.json`, `environment.json` | the settings, and the machine of the run's last process |
| `changes.json` | settings that changed when the run was resumed, if any |
| `profile.json` | the latency profile that the run's decisions used, if any |
| `plans/` | each step's plan: which engine generates which prompts, in which order |
| `rollouts/` | 32 rollouts of each step; all are in `refrain.duckdb` in the run's directory |
| `timelines/`, `moves/` | the work of each engine over time, and the moves of requests |
| `checkpoints.json` | the existing checkpoints, which are Hugging Face directories |
"""
"""Description of the run on MLflow's page."""


def log_run_facts(tracker: Tracker, config: TrainConfig, inputs: Inputs) -> None:
    import ray

    environment = find_environment(ray.nodes())
    found = environment.model_dump_json(indent=1)
    tracker.log_file(None, "environment.json", found.encode())
    tracker.log_tags(
        environment.tags
        | {
            "mlflow.note.content": CONTENTS,
            "mlflow.source.name": "refrain train",
            "refrain.run_dir": str(config.run_dir.absolute()),
            "refrain.exactness": exactness(
                config, on_gpus=ray.cluster_resources().get("GPU", 0) > 0
            ),
        }
        | _prefect_run()
    )
    log_datasets(tracker, config, inputs)
    log_profile(tracker, config)
    log_changes(tracker, config)
    if crashes := read_crashes(config.run_dir):
        told = {"refrain.crashes": str(len(crashes)), "refrain.last_crash": str(crashes[-1])}
        tracker.log_tags(told)


def exactness(config: TrainConfig, *, on_gpus: bool) -> str:
    """Return a sentence about what tokens of this run may depend on, apart from the sample key and
    the policy."""
    if config.model.dtype == "float32":
        return "float32: nothing" if not on_gpus else "float32: a tie, on the order of additions"
    if on_gpus and config.rollout.batch_invariant:
        return "bfloat16, batch invariant: a near-tie, on the number of drafts verified with it"
    return "bfloat16: a near-tie, on the batch and on the drafts verified with it"


def log_datasets(tracker: Tracker, config: TrainConfig, inputs: Inputs) -> None:
    """The prompts of each split, by their keys: a file that is moved has the same digest."""
    data = config.data
    files = {Split.TRAIN: data.train_files, Split.VALIDATION: data.validation_files}
    rows = []
    for split, dataset in inputs.datasets.items():
        keys = "\n".join(prompt.key for prompt in dataset.prompts)
        rows.append(
            {
                "name": ", ".join(path.stem for path in files[split]),
                "digest": sha256(keys.encode()).hexdigest()[:16],
                "context": "training" if split is Split.TRAIN else "validation",
                "files": [str(path) for path in files[split]],
                "num_rows": len(dataset.prompts),
            }
        )
    tracker.log_datasets(rows)


def _prefect_run() -> dict[str, str]:
    """Return tags with the Prefect flow run of this process and its page, if there are any."""
    run = {"refrain.prefect_run": this_flow_run.id, "refrain.prefect_page": this_flow_run.ui_url}
    return {name: value for name, value in run.items() if value}


def log_changes(tracker: Tracker, config: TrainConfig) -> None:
    """Log settings that changed when the run was resumed, as tags `changed/NAME`. You can compare
    runs by these tags. MLflow's parameters keep the values of the run's start."""
    changes = read_changes(config.run_dir)
    if not changes:
        return
    tracker.log_file(None, CONFIG_FILE, config.model_dump_json(indent=2).encode())
    rows = [
        change.model_dump(mode="json") | {"at": time.strftime("%F %T", time.localtime(change.at_s))}
        for change in changes
    ]
    tracker.log_table(None, "changes", rows)
    lines = "\n".join(f"* {row['at']}: {change}" for row, change in zip(rows, changes, strict=True))
    tracker.log_tags(
        {"mlflow.note.content": f"{CONTENTS}\nChanged when resumed:\n\n{lines}\n"}
        | {f"changed/{change.name}": str(change.after) for change in changes}
    )


def log_profile(tracker: Tracker, config: TrainConfig) -> None:
    """Log the file of the run's profile, if one is set."""
    if config.profile is not None:
        path = find_profile(config.profile, config.runs_dir)
        tracker.log_file(None, PROFILE_FILE, path.read_bytes())


def log_checkpoints(tracker: Tracker, directory: Path) -> None:
    """Log the checkpoints that can be restored now."""
    found: list[tuple[Path, CheckpointState]] = [
        (path, read_state(path)) for path in complete_checkpoints(directory)
    ]
    rows = [
        {
            "step": state.step,
            "policy_version": state.policy_version,
            "path": str(path.absolute()),
            "bytes": sum(state.file_bytes.values()),
        }
        for path, state in found
    ]
    tracker.log_table(None, "checkpoints", rows)
    if rows:
        path, state = found[-1]
        tracker.log_tags({"refrain.last_checkpoint": str(path.absolute())})
        tracker.log_checkpoint(state.step, _checkpoint_tags(path, state))


def _checkpoint_tags(path: Path, state: CheckpointState) -> dict[str, str]:
    return {
        "refrain.path": str(path.absolute()),
        "refrain.policy_version": str(state.policy_version),
        "refrain.bytes": str(sum(state.file_bytes.values())),
        "refrain.digest": sha256((path / STATE_FILE).read_bytes()).hexdigest(),
    }
