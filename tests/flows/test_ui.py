"""`refrain ui`: its services, its form, and a run from the form that is cancelled and resumed."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from flows.config_file import load_config
from flows.ui import serve, services
from schemas.evaluation import EvaluateConfig
from schemas.profile import ProfileConfig
from tests.conftest import DEMO, REPOSITORY
from tests.flows.commands import Command
from tests.flows.test_train import processes, query
from tests.listening import assert_on_loopback, family

CANCEL_TIMEOUT_S = 90.0
RUN_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 120.0
NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE = 2, 16, 32


@dataclass(frozen=True)
class Ui:
    command: Command
    runs_dir: Path
    api: str
    mlflow: str

    def stop(self) -> list[psutil.Process]:
        """Stop it as a service's supervisor would; returns what is left running."""
        services = psutil.Process(self.command.process.pid).children(recursive=True)
        self.command.process.send_signal(signal.SIGTERM)
        self.command.process.wait(STOP_TIMEOUT_S)
        return psutil.wait_procs(services, timeout=5.0)[1]


@pytest.fixture
def ui(tmp_path: Path) -> Iterator[Ui]:
    prefect, mlflow = free_ports()
    runs_dir = tmp_path / "runs"
    ports = ("--prefect-port", prefect, "--mlflow-port", mlflow)
    command = Command("ui", "--runs-dir", runs_dir, *map(str, ports))
    try:
        command.wait_for_line("Ctrl-C")
        api, page = (f"http://127.0.0.1:{port}" for port in (prefect, mlflow))
        yield Ui(command, runs_dir, f"{api}/api", page)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(command.process.pid).children(recursive=True)
            command.close()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def small(form: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What the form is filled in with, changed to two short steps."""
    data = directory / "train.parquet"
    rows = NUM_STEPS * PROMPTS_PER_STEP
    pq.write_table(pq.read_table(DEMO / "data" / "train.parquet").slice(0, rows), data)
    return form | {
        "name": "small",
        "num_epochs": 1,
        "prompts_per_step": PROMPTS_PER_STEP,
        "data": form["data"] | {"train": [str(data)], "validation": []},
        "rollout": form["rollout"] | {"num_engines": 1, "group_size": GROUP_SIZE},
    }


async def end_of(client: Any, run_id: Any, timeout_s: float) -> Any:
    """The run's last state."""
    async with asyncio.timeout(timeout_s):
        while not (state := (await client.read_flow_run(run_id)).state).is_final():
            await asyncio.sleep(0.5)
    return state


async def becomes_true(condition: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.5)


@pytest.mark.engine
@pytest.mark.timeout(900)
async def test_a_run_from_the_form_is_cancelled_and_resumed(ui: Ui, tmp_path: Path) -> None:
    from prefect.client.orchestration import PrefectClient
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.states import Cancelling

    async with PrefectClient(ui.api) as client:
        deployment = await client.read_deployment_by_name("train/train")
        check_form(deployment, ui.runs_dir)
        check_profiling(await client.read_deployment_by_name("profile/profile"), ui.runs_dir)
        evaluation = await client.read_deployment_by_name("evaluate/evaluate")
        assert EvaluateConfig.model_validate(evaluation.parameters["config"]).data == ()
        config = small(deployment.parameters["config"], tmp_path)
        run_dir = ui.runs_dir / "small"

        async def start(config: dict[str, Any], resume: bool) -> Any:
            parameters = {"config": config, "resume": resume}
            run = await client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
            return run.id

        with pytest.raises(PrefectHTTPStatusError, match="num_epochs"):
            await start(config | {"num_epochs": 0}, resume=False)

        run_id = await start(config, resume=False)
        await asyncio.to_thread(ui.command.wait_for_line, "train step 1: rolling out")
        assert processes(run_dir)
        # Prefect's and MLflow's pages, and of Ray each server and actor one.
        everything = [*family(psutil.Process(ui.command.process.pid)), *processes(run_dir)]
        assert_on_loopback(everything, at_least=8)
        cancelled_s = time.monotonic()
        await client.set_flow_run_state(run_id, Cancelling())
        state = await end_of(client, run_id, CANCEL_TIMEOUT_S)
        left_s = CANCEL_TIMEOUT_S - (time.monotonic() - cancelled_s)
        await becomes_true(lambda: processes(run_dir) == [], left_s)
        assert state.is_cancelled(), state
        assert mlflow_status(ui, run_dir) == "KILLED"

        run_id = await start(config, resume=True)
        state = await end_of(client, run_id, RUN_TIMEOUT_S)
        assert state.is_completed(), state
    check_files(run_dir)
    assert mlflow_status(ui, run_dir) == "FINISHED"
    assert ui.stop() == []
    assert ui.command.process.returncode == 0
    assert processes(run_dir) == []


def check_form(deployment: Any, runs_dir: Path) -> None:
    """It says what the config's classes say, and is filled in with the demo."""
    demo = load_config(DEMO / "train.yaml").model_copy(
        update={"name": "from-ui", "runs_dir": runs_dir}
    )
    filled_in = demo.model_dump(mode="json", exclude={"algorithm"})
    assert deployment.parameters == {"config": filled_in, "resume": False}
    schemas = deployment.parameter_openapi_schema["definitions"]
    temperature = schemas["RolloutConfig"]["properties"]["temperature"]
    assert temperature["minimum"] == 0.0
    assert temperature["description"] == "0 is greedy."
    assert schemas["TrainConfig"]["required"] == ["model", "data"]


def check_profiling(deployment: Any, runs_dir: Path) -> None:
    """Its form is filled in with the demo's model; its schedule waits to be switched on."""
    config = ProfileConfig.model_validate(deployment.parameters["config"])
    assert (config.runs_dir, config.dtype) == (runs_dir, "float32")
    assert deployment.parameters["overwrite"] is False
    (schedule,) = deployment.schedules
    assert not schedule.active
    assert schedule.parameters == {"overwrite": True}


def check_files(run_dir: Path) -> None:
    """What a run from the terminal leaves."""
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == NUM_STEPS
    assert (run_dir / "config.json").exists()
    assert (run_dir / "checkpoints" / f"global_step_{NUM_STEPS}" / "model").is_dir()
    per_step = "SELECT step, count(*) FROM rollouts GROUP BY step ORDER BY step"
    size = PROMPTS_PER_STEP * GROUP_SIZE
    assert query(run_dir, per_step) == [(1, size), (2, size)]


def mlflow_status(ui: Ui, run_dir: Path) -> str:
    """What MLflow's page says of the run; the run itself wrote to the file behind it."""
    from mlflow import MlflowClient

    run_id = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    assert (run_dir.parent / "mlflow.db").exists()
    return MlflowClient(ui.mlflow).get_run(run_id).info.status


def test_a_port_in_use_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port {port} .* --prefect-port"):
            serve(tmp_path, port, port)


def test_runs_are_served_once(tmp_path: Path) -> None:
    (tmp_path / ".prefect").mkdir()
    with (
        mock.patch.dict(os.environ),
        FileLock(tmp_path / ".prefect" / "ui.lock"),
        pytest.raises(ValueError, match="served already"),
        services(tmp_path, *free_ports()),
    ):
        pass


def test_ui_wants_the_projects_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"prefect\.yaml"):
        serve(tmp_path, *free_ports())
