"""Find the model and the settings of an evaluation, from a run's name, a directory or a file."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refrain.engines.learn.checkpoint import MODEL_DIR, STATE_FILE, checkpoint_name, read_state
from refrain.engines.user_files import validated
from refrain.flows.config_file import read_values
from refrain.schemas.config import TrainConfig
from refrain.schemas.evaluation import EvaluateConfig
from refrain.schemas.sampling import SamplingConfig
from refrain.tasks.run.find import find_run
from refrain.tasks.run.record import read_run
from refrain.tasks.run.run_dir import CONFIG_FILE, is_run

EVALUATIONS = "evaluations"
"""Name of the directory of evaluations, inside the directory of the runs."""
SECTIONS = ("model", "data", "rollout", "reward", "environment")
"""Sections of a run's config that an evaluation uses. The others are about training."""


@dataclass(frozen=True, slots=True)
class EvaluationSubject:
    """A model, and the settings to evaluate it with."""

    config: TrainConfig
    """Config of a run that trains nothing. Its validation is the evaluation."""
    policy_version: int
    """Step in the sample keys, so that the checkpoint gets the same samples as in its run."""
    run_dir: Path | None
    """Directory of the run that the checkpoint belongs to."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory, and the run that it comes from."""

    model: Path
    name: str
    policy_version: int = 0
    run_dir: Path | None = None


def find_subject(given: EvaluateConfig) -> EvaluationSubject:
    """Return the model and settings of an evaluation. Raise ValueError when a file is missing or
    a setting is refused."""
    checkpoint = find_checkpoint(given.checkpoint, given.runs_dir)
    if given.log_to_run and checkpoint.run_dir is None:
        raise ValueError(
            f"{given.checkpoint} belongs to no run, so there is no MLflow run to add figures to: "
            "leave out log_to_run (--log-to-run)"
        )
    _check_overrides(given.overrides)
    # Without a settings file, the defaults of the classes apply.
    values: dict[str, Any] = {"data": {}, "model": {}}
    values |= read_values(_settings_file(given, checkpoint), given.overrides)
    data = [str(path) for path in given.data] or values["data"].get("validation")
    data = [data] if isinstance(data, str | dict) else data
    if not data:
        raise ValueError(
            f"no prompts to evaluate on: {given.config or checkpoint.name} has no "
            "data.validation. Give DATA, for example test.parquet (a veRL-style file)"
        )
    names = "-".join([checkpoint.name, *_stems(data)])
    # File names may have characters that names of runs may not have.
    name = given.name or re.sub(r"[^A-Za-z0-9._-]+", "-", names).lstrip("._-")
    config = {
        **{section: values[section] for section in SECTIONS if section in values},
        "name": name[:64],
        "runs_dir": given.runs_dir / EVALUATIONS,
        "seed": values.get("seed", 0) if given.seed is None else given.seed,
        "validation_samples": given.samples or values.get("validation_samples", 1),
        "drafting": {"enabled": False},
        # There is no trainer to share the GPUs with.
        "placement": "split",
    }
    # An evaluation uses `validation` only, but every config must have `train`. A single source is
    # no mixture, which could be refused.
    train = data[:1] if isinstance(data[0], dict) else data
    used = {"train": train, "validation": data}
    config["data"] = _dates(checkpoint) | config["data"] | used
    config["model"] = config["model"] | {"path": str(checkpoint.model.absolute())}
    config["rollout"] = _sampling(config.get("rollout", {}), given.overrides)
    # Nothing is trained: a response of any length fits.
    config["trainer"] = {"micro_batch_tokens": 2**31}
    source = given.config or str(checkpoint.run_dir or given.checkpoint)
    valid = validated(config, source, TrainConfig)
    return EvaluationSubject(valid, checkpoint.policy_version, checkpoint.run_dir)


def find_checkpoint(name: str, runs_dir: Path) -> Checkpoint:
    """Return the checkpoint with this path or run name. Raise ValueError when `name` is neither a
    checkpoint, nor a run with one, nor a model's directory."""
    path = Path(name)
    if path.name == MODEL_DIR and (path.parent / STATE_FILE).is_file():
        path = path.parent
    if (path / STATE_FILE).is_file():
        return _of_checkpoint(path)
    if (path / "config.json").is_file() and not is_run(path):
        return Checkpoint(path, path.name)
    if os.sep in name and not path.exists():
        raise ValueError(f"{name} does not exist: give a checkpoint, a run, or a model's directory")
    record = read_run(find_run(name, runs_dir))
    if record.checkpoint is None:
        raise ValueError(f"{record.run_dir} has no checkpoint yet: train it for at least one step")
    return _of_checkpoint(record.checkpoint)


def _of_checkpoint(path: Path) -> Checkpoint:
    version = read_state(path).policy_version
    run_dir = path.absolute().parent.parent
    if not (path.name == checkpoint_name(version) and is_run(run_dir)):
        return Checkpoint(path / MODEL_DIR, path.name, version)
    return Checkpoint(path / MODEL_DIR, f"{run_dir.name}-step-{version}", version, run_dir)


def _settings_file(given: EvaluateConfig, checkpoint: Checkpoint) -> Path | None:
    if given.config is None:
        return checkpoint.run_dir / CONFIG_FILE if checkpoint.run_dir else None
    if Path(given.config).is_file():
        return Path(given.config)
    return find_run(given.config, given.runs_dir) / CONFIG_FILE


def _dates(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the date of the checkpoint's run."""
    if checkpoint.run_dir is None:
        return {}
    recorded = read_values(checkpoint.run_dir / CONFIG_FILE, ())["data"]
    return {"date": recorded["date"]} if "date" in recorded else {}


def _stems(data: Sequence[Any]) -> list[str]:
    """Return the names of the sources, or of the files without their endings."""
    return [str(one.get("name")) if isinstance(one, dict) else Path(one).stem for one in data]


def _check_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        section = override.partition(".")[0]
        if section not in SECTIONS:
            raise ValueError(
                f"override {override!r} has no effect on an evaluation: you can override "
                f"{', '.join(f'{section}.*' for section in SECTIONS)}; samples and seed are "
                "options"
            )
        if override.startswith(("model.path", "data.train", "data.validation")):
            raise ValueError(
                f"override {override!r}: give the model as CHECKPOINT and the data as DATA"
            )


def _sampling(rollout: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return the rollout settings: the run's validation sampling, unless an override changes it.
    Temperature 0 becomes top_k = 1. Drop `weight_sync`: there is no trainer to get weights from."""
    rollout = {name: value for name, value in rollout.items() if name != "weight_sync"}
    names = tuple(f"rollout.{name}=" for name in SamplingConfig.model_fields)
    if any(override.startswith(names) for override in overrides):
        rollout = {**rollout, "validation": None}
    greedy = rollout.get("temperature") == 0
    return rollout | ({"temperature": 1.0, "top_k": 1} if greedy else {})
