"""Do what a newcomer does after `make ui`, in a real browser, on real servers, with real runs."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pyarrow.parquet as pq
import pytest

from refrain.flows.auth import GIVEN, password_file
from refrain.flows.config_file import load_config
from refrain.flows.deployments import deploy
from refrain.schemas.evaluation import EvaluateConfig
from refrain.schemas.profile import ProfileConfig
from tests.browser.pages import Browser, PrefectPages
from tests.browser.ui import Ui
from tests.conftest import DEMO, REPOSITORY
from tests.flows.test_train import processes, query
from tests.sockets import assert_on_loopback, family

CANCEL_TIMEOUT_S = 240.0
RUN_TIMEOUT_S = 400.0
NAME, NUM_STEPS, PROMPTS_PER_STEP, GROUP_SIZE = "small", 2, 4, 256
"""The run must last longer than Prefect takes to cancel it."""

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def pages(browser: Browser, ui: Ui) -> PrefectPages:
    """Log in with the password, after a guessed one was refused. Return Prefect's pages."""
    pages = PrefectPages(browser, ui.prefect)
    pages.log_in("refrain:guessed")
    browser.see("Authentication failed.")
    pages.log_in(ui.password)
    browser.see("train-sync")
    return pages


@pytest.fixture
def client(ui: Ui) -> Iterator[Any]:
    from prefect.client.orchestration import SyncPrefectClient

    with SyncPrefectClient(ui.api, auth_string=ui.password) as client:
        yield client


def sizes(
    directory: Path, num_steps: int = NUM_STEPS, group_size: int = GROUP_SIZE
) -> dict[str, Any]:
    """Return the changes that reduce the demo to a few short steps on one engine."""
    data = directory / "train.parquet"
    rows = num_steps * PROMPTS_PER_STEP
    pq.write_table(pq.read_table(DEMO / "data" / "train.parquet").slice(0, rows), data)
    return {
        "num_epochs": 1,
        "prompts_per_step": PROMPTS_PER_STEP,
        "data.train": [str(data)],
        "data.validation": [],
        "rollout.num_engines": 1,
        "rollout.group_size": group_size,
    }


def start(pages: PrefectPages, name: str, changes: dict[str, Any], resume: bool = False) -> None:
    """Start a training run from its form."""
    pages.open_form("train")
    pages.browser.fill_in("Name (Optional)", "textarea", name)
    if resume:
        pages.set_switch_of("resume (Optional)", on=True)
    sent = pages.change_json(changes)
    assert (sent["config"]["name"], sent["resume"]) == (name, resume)
    # The algorithm's type sets the defaults of these fields, so the form must leave them out.
    assert {"clip_high", "dynamic_sampling", "tis_cap"}.isdisjoint(sent["config"]["algorithm"])
    pages.submit()


def newest_run(client: Any, flow: str) -> Any:
    from prefect.client.schemas.filters import FlowFilter
    from prefect.client.schemas.sorting import FlowRunSort

    flow_filter = FlowFilter.model_validate({"name": {"any_": [flow]}})
    found = client.read_flow_runs(
        flow_filter=flow_filter, sort=FlowRunSort.EXPECTED_START_TIME_DESC, limit=1
    )
    return found[0]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not {what} within {timeout_s:.0f} s"
        time.sleep(0.3)


def state_of(client: Any, run_id: Any) -> Any:
    return client.read_flow_run(run_id).state


def rolls_out(client: Any, run_id: Any, run_dir: Path, step: int = 1) -> bool:
    """Return whether the run rolls out this step or a later one."""
    progress = run_dir / "progress.json"
    found = re.search(r"step (\d+): rolling out", progress.read_text() if progress.exists() else "")
    if found and int(found[1]) >= step:
        return True
    state = state_of(client, run_id)
    assert not state.is_final(), state
    return False


def start_that_fails(client: Any, ui: Ui) -> Any:
    """Queue an evaluation of a missing checkpoint. It fails as soon as it may start."""
    deployment = client.read_deployment_by_name("evaluate/evaluate")
    config = {"checkpoint": "nowhere", "runs_dir": str(ui.runs_dir)}
    run = client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})
    return run.id


def drives(process: psutil.Process, run_id: Any) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("PREFECT__FLOW_RUN_ID") == str(run_id)
    return False


def arguments(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def is_gone_first(process: psutil.Process, client: Any, waiting: Any) -> bool:
    """Return whether the process has ended. Assert that the waiting run did not start before."""
    is_waiting = state_of(client, waiting).is_scheduled()
    is_gone = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert is_waiting or is_gone
    return is_gone


def watch(pages: PrefectPages, client: Any, run_id: Any, ends_as: str) -> None:
    """Wait until the run's page shows how it ended. Close the page meanwhile: its graph would take
    a core that the run needs."""
    pages.browser.rest()
    wait_until(lambda: state_of(client, run_id).is_final(), "over", RUN_TIMEOUT_S)
    pages.open_run(run_id)
    pages.see_state(ends_as)


def test_a_run_from_the_form_is_cancelled_resumed_and_looked_at(
    ui: Ui, browser: Browser, pages: PrefectPages, client: Any, tmp_path: Path
) -> None:
    browser.open(f"{ui.prefect}/deployments")
    browser.see("train", "train-sync", "train-pipelined", "profile", "evaluate")
    check_forms(client, ui.runs_dir)
    check_refusal(client)
    run_dir, changes = ui.runs_dir / NAME, sizes(tmp_path)
    start(pages, NAME, changes)
    run_id = newest_run(client, "train").id
    browser.rest()
    wait_until(lambda: rolls_out(client, run_id, run_dir), "rolling out", RUN_TIMEOUT_S)
    # Prefect and MLflow have one port each, and so have Ray's servers and actors.
    everything = [*family(psutil.Process(ui.command.process.pid)), *processes(run_dir)]
    assert_on_loopback(everything, at_least=8)
    assert not [one for one in everything if ui.password in arguments(one)]
    waiting = start_that_fails(client, ui)
    pages.open_run(run_id)
    browser.press("Cancel")
    browser.press("Confirm")
    # During the teardown its GPUs are not free, so the waiting run must not start.
    driver = next(one for one in everything if drives(one, run_id))
    browser.rest()
    wait_until(lambda: is_gone_first(driver, client, waiting), "ended", CANCEL_TIMEOUT_S)
    watch(pages, client, run_id, "Cancelled")
    wait_until(lambda: processes(run_dir) == [], "gone", CANCEL_TIMEOUT_S)
    assert mlflow_status(ui, run_dir) == "KILLED"
    wait_until(lambda: state_of(client, waiting).is_final(), "over", RUN_TIMEOUT_S)

    log_in_to_mlflow(browser, ui)
    start(pages, NAME, changes, resume=True)
    resumed_id = newest_run(client, "train").id
    assert resumed_id != run_id
    watch(pages, client, resumed_id, "Completed")
    check_files(run_dir)
    assert mlflow_status(ui, run_dir) == "FINISHED"
    look_at_record(browser)
    look_at_mlflow(browser, ui)


@pytest.mark.slow
def test_a_run_that_failed_is_tried_again(
    ui: Ui, browser: Browser, pages: PrefectPages, client: Any, tmp_path: Path
) -> None:
    """Its page shows every step once, with its record, whichever try completed the step."""
    run_dir = ui.runs_dir / "retried"
    # Long rollouts, a checkpoint after every second step, and no retries by the run itself.
    changes = sizes(tmp_path, 4, 128)
    changes |= {"trainer.save_every_steps": 2, "trainer.max_failures": 0}
    start(pages, "retried", changes)
    run_id = newest_run(client, "train").id
    browser.rest()
    wait_until(lambda: rolls_out(client, run_id, run_dir, 3), "in step 3", RUN_TIMEOUT_S)
    trainer = [p for p in processes(run_dir) if arguments(p).startswith("ray::TrainerActor")]
    assert trainer
    for process in trainer:
        process.kill()
    watch(pages, client, run_id, "Failed")
    assert {run.name: run.state.name for run in steps_of(client, run_id)} == {
        "step 1": "Completed",
        "step 2": "Completed",
        "step 3": "Failed",
    }
    before = {run.name: run.id for run in steps_of(client, run_id)}
    # Retry only after the first process has ended: Prefect would take its end for the second's.
    wait_until(lambda: logged(client, run_id, "exited with status code") == 1, "ended", 120.0)
    pages.retry()
    wait_until(lambda: not state_of(client, run_id).is_final(), "begun again", RUN_TIMEOUT_S)
    watch(pages, client, run_id, "Completed")
    steps = steps_of(client, run_id)
    assert [run.name for run in steps] == [f"step {step}" for step in range(1, 5)]
    assert {run.state.name for run in steps} == {"Completed"}
    assert before.items() <= {run.name: run.id for run in steps}.items()
    assert [run.run_count for run in steps] == [1, 1, 2, 1]
    assert [pages_of(client, run.id) for run in steps] == [["retried-step"]] * 4
    assert all("retried" in run.tags for run in steps)
    assert logged(client, steps[2].id, "train step 3: rolling out") == 2
    browser.press_tab("Subflow Runs")
    browser.see("step 1", "step 2", "step 3", "step 4")


def steps_of(client: Any, run_id: Any) -> list[Any]:
    from prefect.client.schemas.filters import FlowRunFilter

    of_run = FlowRunFilter.model_validate({"parent_flow_run_id": {"any_": [run_id]}})
    return sorted(client.read_flow_runs(flow_run_filter=of_run), key=lambda run: run.name)


def pages_of(client: Any, run_id: Any) -> list[str]:
    from prefect.client.schemas.filters import ArtifactFilter

    of_run = ArtifactFilter.model_validate({"flow_run_id": {"any_": [run_id]}})
    found = client.read_artifacts(artifact_filter=of_run)
    return sorted(page.key for page in found if page.type == "markdown")


def logged(client: Any, run_id: Any, text: str) -> int:
    from prefect.client.schemas.filters import LogFilter

    of_run = LogFilter.model_validate({"flow_run_id": {"any_": [run_id]}})
    return sum(text in line.message for line in client.read_logs(log_filter=of_run))


@pytest.mark.slow
def test_the_schedule_is_switched_on_and_off(
    ui: Ui,
    browser: Browser,
    pages: PrefectPages,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def schedule() -> Any:
        (only,) = client.read_deployment_by_name("profile/profile").schedules
        return only

    def scheduled() -> list[Any]:
        from prefect.client.schemas.filters import DeploymentFilter

        named = DeploymentFilter.model_validate({"name": {"any_": ["profile"]}})
        return client.read_flow_runs(deployment_filter=named)

    pages.open_deployment("profile")
    browser.see("At 03:00 AM, only on Sunday")
    assert (schedule().active, scheduled()) == (False, [])
    pages.set_switch(on=True)
    wait_until(lambda: schedule().active, "switched on", 60.0)
    assert schedule().schedule.cron == "0 3 * * 0"
    wait_until(scheduled, "scheduled", 60.0)
    run = min(scheduled(), key=lambda run: run.expected_start_time)
    when = run.expected_start_time
    assert (when.isoweekday(), when.hour, when.minute) == (7, 3, 0)
    assert run.parameters["overwrite"] is True
    # The next start of `refrain ui` must not switch it off.
    monkeypatch.setenv("PREFECT_API_URL", ui.api)
    monkeypatch.setenv(GIVEN, ui.password)
    monkeypatch.chdir(REPOSITORY)
    deploy(ui.api, ui.runs_dir)
    assert schedule().active
    pages.open_deployment("profile")
    pages.set_switch(on=False)
    wait_until(lambda: not schedule().active, "switched off", 60.0)


def test_nothing_is_left(ui: Ui) -> None:
    assert ui.stop() == []
    assert ui.command.process.returncode == 0
    assert processes(ui.runs_dir / NAME) == []
    secret = ui.password.encode()
    files = {file for file in ui.runs_dir.rglob("*") if file.is_file()}
    holding = {file for file in files if secret in file.read_bytes()}
    assert holding == {password_file(ui.runs_dir)}, "the password is in other files"


def check_forms(client: Any, runs_dir: Path) -> None:
    """Assert that the forms are filled in, with descriptions and bounds of the config's classes."""
    files = {
        "train": DEMO / "train.yaml",
        "train-sync": REPOSITORY / "infra" / "presets" / "sync.yaml",
        "train-pipelined": REPOSITORY / "infra" / "presets" / "pipelined.yaml",
    }
    for name, file in files.items():
        deployment = client.read_deployment_by_name(f"train/{name}")
        config = load_config(file).model_copy(update={"runs_dir": runs_dir})
        if name == "train":
            config = config.model_copy(update={"name": "from-ui"})
        filled_in = config.model_dump(mode="json") | {"algorithm": {"type": "grpo"}}
        assert deployment.parameters == {"config": filled_in, "resume": False}
        schemas = deployment.parameter_openapi_schema["definitions"]
        temperature = schemas["RolloutConfig"]["properties"]["temperature"]
        assert temperature["minimum"] == 0.0
        assert temperature["description"].startswith("The logits are divided by this")
        assert schemas["TrainConfig"]["required"] == ["model", "data"]
    profile = client.read_deployment_by_name("profile/profile").parameters
    config = ProfileConfig.model_validate(profile["config"])
    assert (config.runs_dir, config.dtype) == (runs_dir, "float32")
    assert profile["overwrite"] is False
    evaluation = client.read_deployment_by_name("evaluate/evaluate").parameters
    assert EvaluateConfig.model_validate(evaluation["config"]).data == ()


def check_refusal(client: Any) -> None:
    """Assert that the server itself refuses a bad value, which the browser would not send."""
    from prefect.exceptions import PrefectHTTPStatusError

    deployment = client.read_deployment_by_name("train/train")
    config = deployment.parameters["config"] | {"num_epochs": 0}
    with pytest.raises(PrefectHTTPStatusError, match="num_epochs"):
        client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})


def look_at_record(browser: Browser) -> None:
    """Go from the run's page in Prefect to a step's page, and on to MLflow."""
    browser.press_tab("Artifacts")
    browser.see(f"{NAME}-run", "Where to look")
    browser.press_tab("Subflow Runs")
    browser.follow("step 2")
    browser.press_tab("Artifacts")
    browser.click(f"//a[contains(., '{NAME}-step')]")
    browser.see("Step 2 of 2, epoch 1 of 1", "What happened", "1,024 rollouts")
    browser.follow("The run in MLflow")
    browser.go_to_newest_tab()


def log_in_to_mlflow(browser: Browser, ui: Ui) -> None:
    """Log in by the address: a test cannot see the browser's login dialog."""
    browser.open(ui.mlflow.replace("//", f"//{ui.password}@"))


def look_at_mlflow(browser: Browser, ui: Ui) -> None:
    browser.see(NAME, "Finished", "the settings, and the machine")
    assert browser.url.startswith(ui.mlflow)
    browser.click("//*[@role='tab'][normalize-space()='Artifacts']")
    for folder in ("plans", "rollouts"):
        browser.click(f"//*[normalize-space(text())='{folder}']")
        browser.click("//*[normalize-space(text())='train-00002.json']")
        browser.see(f"{folder}/train-00002.json")
        browser.click(f"//*[normalize-space(text())='{folder}']")
        browser.see_no("//*[normalize-space(text())='train-00002.json']")
    browser.click("//*[normalize-space(text())='timelines']")
    browser.click("//*[normalize-space(text())='train-00002.html']")
    browser.see("timelines/train-00002.html")
    browser.enter("//iframe")
    browser.find("//*[name()='svg'][@id='chart']//*[name()='rect']")
    browser.leave()


def check_files(run_dir: Path) -> None:
    """Assert that the run left the same files as a run from the terminal."""
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == NUM_STEPS
    assert (run_dir / "config.json").exists()
    assert (run_dir / "checkpoints" / f"global_step_{NUM_STEPS}" / "model").is_dir()
    per_step = "SELECT step, count(*) FROM rollouts GROUP BY step ORDER BY step"
    size = PROMPTS_PER_STEP * GROUP_SIZE
    assert query(run_dir, per_step) == [(1, size), (2, size)]


def mlflow_status(ui: Ui, run_dir: Path) -> str:
    """Return the run's status from MLflow's server. The run itself wrote to the server's file."""
    from mlflow import MlflowClient

    run_id = json.loads((run_dir / "mlflow.json").read_text())["run_id"]
    assert (run_dir.parent / "mlflow.db").exists()
    user, _, password = ui.password.partition(":")
    login = {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
    with mock.patch.dict(os.environ, login):
        return MlflowClient(ui.mlflow).get_run(run_id).info.status
