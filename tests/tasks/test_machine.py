"""A run that does not fit on the machine is refused before the start. The error shows why."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import refrain.flows.environment
import refrain.tasks.run.machine
from refrain.flows.cli import main
from refrain.flows.config_file import load_config
from refrain.tasks.profile import gpus_wanted
from refrain.tasks.run.machine import check_gpus, plan_engines, plan_training
from tests.conftest import DEMO
from tests.flows.commands import write_config

GB = int(1e9)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return monkeypatch


def config_of(tmp_path: Path, **changes: object):
    return load_config(write_config(tmp_path, **changes), [])


def test_engines_on_cpus_need_memory(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    alone.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 0)
    alone.setattr(refrain.tasks.run.machine, "host_memory", lambda: (24 * GB, 1 * GB))
    small = config_of(tmp_path, rollout__num_engines=4)
    assert plan_training(small).says.startswith("On CPUs, with about 4.1 GB of memory (3.5 GB")
    many = config_of(tmp_path, rollout__num_engines=64)
    with pytest.raises(ValueError, match=r"need 56\.\d GB .*64 engine processes.* 22\.8 GB"):
        plan_training(many)
    with pytest.raises(ValueError, match="64 engine processes"):
        plan_engines(many)


@pytest.mark.parametrize(("num_engines", "tp_degree"), [(5, 2), (64, 1)])
def test_gpus_are_counted(
    num_engines: int, tp_degree: int, tmp_path: Path, alone: pytest.MonkeyPatch
) -> None:
    alone.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 8)
    changes = {"rollout__num_engines": num_engines, "rollout__tp_degree": tp_degree}
    many = config_of(tmp_path, placement="split", **changes)
    wanted = num_engines * tp_degree
    with pytest.raises(ValueError, match=rf"takes {wanted} GPUs \({wanted} for rollout"):
        plan_training(many.model_copy(update={"placement": "shared"}))
    with pytest.raises(
        ValueError,
        match=rf"takes {wanted + 1} GPUs \({wanted} for rollout.num_engines x .*, free are 8",
    ):
        plan_training(many)


def test_an_evaluation_has_no_trainer(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    alone.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 2)
    config = config_of(tmp_path, placement="split", rollout__num_engines=2)
    assert plan_engines(config).says == "Takes 2 of the 2 GPUs here."
    with pytest.raises(ValueError, match=r"the trainer wants 1 GPUs"):
        plan_training(config)


def test_in_turn_with_the_engines_a_trainer_wants_no_more_gpus(
    tmp_path: Path, alone: pytest.MonkeyPatch
) -> None:
    alone.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 2)
    alone.setattr(refrain.tasks.run.machine, "gpu_memory", lambda: None)
    config = config_of(tmp_path, rollout__num_engines=2, trainer__num_processes=2)
    assert plan_training(config).says.startswith("Takes 2 of the 2 GPUs here, engines and trainer")
    with pytest.raises(ValueError, match=r"wants 3 GPUs .* which have 2: .* set placement=split"):
        plan_training(config_of(tmp_path, trainer__num_processes=3))


def test_runs_on_a_cluster_are_checked_there(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    alone.setenv("RAY_ADDRESS", "head:6379")
    assert "cluster" in plan_training(config_of(tmp_path, rollout__num_engines=640)).says


def test_a_profile_counts_them_too(alone: pytest.MonkeyPatch) -> None:
    from refrain.schemas.profile import ProfileConfig

    alone.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 3)
    config = ProfileConfig(model=DEMO / "model", tp_degrees=(1, 4))
    with pytest.raises(ValueError, match="num_engines x the largest of tp_degrees"):
        check_gpus(gpus_wanted(config))


def test_check_reports_the_gpus_of_a_run(tmp_path: Path, alone: pytest.MonkeyPatch) -> None:
    path = write_config(tmp_path)
    alone.setattr(refrain.tasks.run.machine, "require_gpus", lambda: 8)
    alone.setattr(refrain.tasks.run.machine, "gpu_memory", lambda: 80 * GB)
    alone.setattr(refrain.tasks.run.machine, "host_memory", lambda: (512 * GB, 500 * GB))
    done = CliRunner().invoke(main, ["train", str(path), "--check"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == (
        "Takes 2 of the 8 GPUs here, engines and trainer in turn."
    )
    done = CliRunner().invoke(main, ["train", str(path), "--check", "rollout.num_engines=64"])
    assert done.exit_code == 2
    assert "free are 8" in done.output

    def none() -> int:
        raise ValueError("no GPU can be used: an old driver")

    alone.setattr(refrain.tasks.run.machine, "require_gpus", none)
    done = CliRunner().invoke(main, ["train", str(path), "--check"])
    assert (done.exit_code, "an old driver" in done.output) == (2, True)


@pytest.mark.parametrize(
    ("build", "address", "files", "hidden"),
    [
        (None, "local", ["nvidia0"], True),
        (None, "local", [], False),
        (None, "head:6379", ["nvidia0"], False),
        ("13.0", "local", ["nvidia0"], False),
    ],
)
def test_the_cpu_build_leaves_gpus_out(
    build: str | None,
    address: str,
    files: list[str],
    hidden: bool,
    tmp_path: Path,
    alone: pytest.MonkeyPatch,
) -> None:
    environment = {"RAY_ADDRESS": address}
    alone.setattr(refrain.flows.environment.os, "environ", environment)
    alone.setattr(refrain.flows.environment, "cuda_build", lambda: build)
    alone.setattr(refrain.flows.environment, "device_files", lambda: files)
    refrain.flows.environment.use_embedded_services(tmp_path)
    assert (environment.get("CUDA_VISIBLE_DEVICES") == "") is hidden
