"""A schedule measures a profile again. One of its runs is killed, and the next one continues it."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from refrain.schemas.latency import Profile
from refrain.schemas.profile import PROFILE_FILE, ProfileConfig
from refrain.tasks.profile_inputs import beside
from refrain.tasks.run.run_dir import CONFIG_FILE
from tests.browser.test_ui import RUN_TIMEOUT_S, drives, state_of, wait_until
from tests.browser.ui import Ui
from tests.conftest import DEMO
from tests.flows.commands import Command
from tests.flows.test_train import processes

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

SMALL = ("--dtype", "float32", "--max-context", "220", "--max-batch", "4", "--windows", "1")
NUM_PASSES = 30
"""Many passes, so that the scheduled run takes a while."""
EVERY = timedelta(seconds=30)
UNTIL_THE_MIDDLE_S = 12.0
NUM_POINTS = re.compile(r"TP 1, decode and prefill: (\d+) points")


def test_run_after_a_killed_one_completes_the_profile(ui: Ui) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    config, num_points = measure(ui.runs_dir)
    num_all = NUM_PASSES * num_points
    profile = config.run_dir / PROFILE_FILE
    before = profile.read_text()
    with SyncPrefectClient(ui.api, auth_string=ui.password) as client:
        change = {"passes": NUM_PASSES}
        switch(client, on=True, config=config.model_copy(update=change).model_dump(mode="json"))
        killed = first(client, lambda run: points_said(client, run) == num_all)
        time.sleep(UNTIL_THE_MIDDLE_S)
        for process in psutil.process_iter():
            if drives(process, killed.id):
                process.kill()
        wait_until(lambda: state_of(client, killed.id).is_final(), "over", RUN_TIMEOUT_S)
        assert state_of(client, killed.id).is_crashed()
        assert profile.read_text() == before
        again = first(client, lambda run: run.id != killed.id)
        assert again.expected_start_time > killed.expected_start_time
        switch(client, on=False)
        wait_until(lambda: state_of(client, again.id).is_final(), "over", RUN_TIMEOUT_S)
        assert state_of(client, again.id).is_completed()
        assert 0 < points_said(client, again) < num_all
    old, new = (Profile.model_validate_json(text) for text in (before, profile.read_text()))
    assert new.created_s > old.created_s
    assert shape(new) == shape(old)
    assert not beside(config).run_dir.exists()
    assert processes(config.run_dir) == []


def measure(runs_dir: Path) -> tuple[ProfileConfig, int]:
    """Make a profile. Return its config and the number of points that one pass measures."""
    command = Command("profile", "--model", DEMO / "model", "--runs-dir", runs_dir, *SMALL)
    try:
        (num_points,) = NUM_POINTS.findall(command.finish())
    finally:
        command.close()
    (directory,) = (runs_dir / "profiles").iterdir()
    return ProfileConfig.model_validate_json((directory / CONFIG_FILE).read_text()), int(num_points)


def switch(client: Any, on: bool, **parameters: object) -> None:
    """Switch the deployment's schedule on or off, with these parameters and a short interval."""
    from prefect.client.schemas.schedules import IntervalSchedule

    deployment = client.read_deployment_by_name("profile/profile")
    (schedule,) = deployment.schedules
    assert schedule.parameters["overwrite"] is True
    client.update_deployment_schedule(
        deployment.id,
        schedule.id,
        active=on,
        schedule=IntervalSchedule(interval=EVERY),
        parameters={**schedule.parameters, **parameters},
    )


def first(client: Any, condition: Callable[[Any], bool]) -> Any:
    """Wait for runs of the schedule that fulfil the condition, and return the earliest."""

    def found() -> list[Any]:
        runs = [run for run in client.read_flow_runs() if run.deployment_id and run.start_time]
        return [run for run in runs if condition(run)]

    wait_until(found, "scheduled, run and as it should be", RUN_TIMEOUT_S)
    return min(found(), key=lambda run: run.expected_start_time)


def points_said(client: Any, run: Any) -> int:
    """Return the number of points to measure from the run's log, or 0 if it is not there yet."""
    from prefect.client.schemas.filters import LogFilter

    of_run = LogFilter.model_validate({"flow_run_id": {"any_": [run.id]}})
    lines = [line.message for line in client.read_logs(log_filter=of_run)]
    said = [int(num) for line in lines for num in NUM_POINTS.findall(line)]
    return said[0] if said else 0


def shape(profile: Profile) -> set[tuple[Any, ...]]:
    return {(p.kind, p.batch, p.window) for p in profile.points}
