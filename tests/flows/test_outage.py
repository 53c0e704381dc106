"""MLflow's and Prefect's servers die during a run. The run goes on, and its record is complete. The
servers answer no stranger."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from refrain.benchmarks.overhead import free_port
from refrain.benchmarks.stand_ins import made_up_config
from refrain.benchmarks.timed_stubs import LocalStore, hollow_run
from refrain.engines.bounded import together
from refrain.flows.auth import ASKED, GIVEN, MLFLOW_ASKED, mlflow_login
from refrain.flows.deployments import client_of
from refrain.flows.ui import HOST, Service, servers, use_servers
from tests.conftest import DEMO
from tests.flows.commands import Command
from tests.flows.test_auth import STRANGER, answer, assert_closed, auth_header
from tests.tracking.test_tracking import table_rows

NUM_STEPS, NUM_ROLLOUTS = 3, 64

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


class Servers:
    """Prefect's and MLflow's servers. They keep their ports when they are started again."""

    def __init__(self, runs_dir: Path, stack: ExitStack) -> None:
        self.runs_dir, self.ports, self._stack = runs_dir, (free_port(), free_port()), stack
        self.tracking_uri = f"http://{HOST}:{self.ports[1]}"
        self._running: list[Service] = []

    def start(self) -> None:
        """Start both, and return when they answer."""
        self._running = self._stack.enter_context(servers(self.runs_dir, *self.ports))

    def kill(self) -> None:
        """Kill both at once, as if their machine had gone down."""
        for service in self._running:
            os.killpg(service.process.pid, signal.SIGKILL)
            service.process.wait()


@pytest.fixture(scope="module", name="servers")
def two_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start both servers and set Prefect's client to use them."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        for name in (ASKED, GIVEN, MLFLOW_ASKED):
            os.environ.pop(name, None)
        own = Servers(tmp_path_factory.mktemp("servers"), stack)
        use_servers(own.runs_dir, own.ports[0])
        os.environ |= mlflow_login()
        own.start()
        known = {
            setting: os.environ[setting.name]
            for setting in (PREFECT_API_URL, PREFECT_API_AUTH_STRING)
        }
        stack.enter_context(temporary_settings(known))
        yield own


async def test_a_run_outlives_its_servers(servers: Servers, tmp_path: Path) -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client

    from refrain.flows.step import rl_step
    from refrain.tasks.run.live import missing_record

    config = made_up_config(tmp_path, "hollow", NUM_ROLLOUTS, 16)
    config.run_dir.mkdir()
    store = LocalStore(config.run_dir / "refrain.duckdb")

    @flow
    async def steps() -> tuple[str, list[str], list[str]]:
        uri = servers.tracking_uri
        async with hollow_run(config, store, NUM_STEPS, 1000.0, uri) as (live, _):
            run, reached = live.run, live.milestones
            async with together() as steps:
                steps.create_task(rl_step(1, live.ref, live.engines, reached))
                await reached.committed.wait(1)
                async with get_client() as client:
                    await written_tasks(client, "report_step", 1)
                await asyncio.to_thread(servers.kill)
                run.tracker.log_metrics({"outage": 1.0}, step=1)
                steps.create_task(asyncio.to_thread(servers.start))
                for step in (2, 3):
                    steps.create_task(rl_step(step, live.ref, live.engines, reached))
                    await reached.committed.wait(step)
            await asyncio.to_thread(run.tracker.flush)
            await asyncio.to_thread(run.pages.flush)
            return run.tracker.run_id, missing_record(run), run.progress.said

    run_id, missing, said = await steps()
    assert missing == []
    assert any("MLflow does not answer" in sentence for sentence in said)
    check_mlflow(servers.tracking_uri, run_id)
    await check_prefect()


def check_mlflow(uri: str, run_id: str) -> None:
    """Assert that MLflow has every step's metrics, table and page once."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    every = list(range(1, NUM_STEPS + 1))
    assert client.get_run(run_id).info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run_id, "critic/score/mean")] == every
    assert [m.value for m in client.get_metric_history(run_id, "outage")] == [1.0]
    for folder in ("plans", "rollouts", "timelines"):
        paths = {Path(a.path).stem for a in client.list_artifacts(run_id, folder)}
        assert paths == {f"train-{step:05d}" for step in every}, folder
    for step in every:
        path = client.download_artifacts(run_id, f"rollouts/train-{step:05d}.json")
        assert len(table_rows(path)) == 32


async def check_prefect() -> None:
    """Assert that every step's flow is completed, has its page, and links its tasks."""
    from prefect.client.orchestration import get_client

    async with get_client() as client:
        runs = await client.read_flow_runs()
        artifacts = await client.read_artifacts()
        tasks = await written_tasks(client, "report_step", NUM_STEPS)
    steps = {run.id: run for run in runs if run.name.startswith("step ")}
    assert sorted(run.name for run in steps.values()) == ["step 1", "step 2", "step 3"]
    assert all(run.state and run.state.is_completed() for run in steps.values())
    pages = [artifact for artifact in artifacts if artifact.key == "hollow-step"]
    assert {page.flow_run_id for page in pages} == set(steps)
    assert all("## What happened" in str(page.data) for page in pages)
    for step in steps:
        plan = tasks[step, "rank_and_group"]
        for name in ("rollout", "report_step"):
            assert plan.id in {source.id for source in tasks[step, name].task_inputs["plan"]}
    progress = [artifact for artifact in artifacts if artifact.key == "hollow-rollout"]
    assert {artifact.data for artifact in progress} == {100.0}


async def written_tasks(client: Any, name: str, num: int) -> dict[tuple[Any, str], Any]:
    """Wait until Prefect's server has stored `num` tasks of this name: a killed server loses those
    in its memory. Return all tasks by flow run and name."""
    for _ in range(60):
        runs = await client.read_task_runs(limit=200)
        tasks = {(run.flow_run_id, run.name.rpartition("-")[0]): run for run in runs}
        if sum(name == found for _, found in tasks) >= num:
            return tasks
        await asyncio.sleep(1.0)
    raise AssertionError(f"Prefect knows {sorted(found for _, found in tasks)}")


def test_no_stranger_is_answered(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = os.environ["PREFECT_API_URL"]
    assert_closed(api)
    flows, own = f"{api}/flows/filter", api.removesuffix("/api")
    for page in (own, own.replace(HOST, "localhost")):
        assert answer(flows, Origin=page, **auth_header())[1]["Access-Control-Allow-Origin"] == page
    search = f"{servers.tracking_uri}/api/2.0/mlflow/experiments/search"
    body, port = b'{"max_results": 1}', servers.ports[1]
    assert answer(search, body)[0] == 401
    assert answer(f"{servers.tracking_uri}/health", None)[0] == 200
    known = auth_header()
    assert answer(search, body, **known)[0] == 200
    assert answer(search, body, Host=f"localhost:{port}", **known)[0] == 200
    # DNS rebinding: a foreign name may resolve to this machine. MLflow itself would allow it.
    assert answer(search, body, Host="10.example.com", **known)[0] == 403
    for page in (STRANGER, f"http://localhost:{port + 1}"):
        assert answer(search, body, Origin=page, **known)[0] == 403
    monkeypatch.delenv(GIVEN)
    with (
        pytest.raises(ValueError, match=rf"refuses {api}/.*: set {GIVEN}"),
        client_of(api) as client,
    ):
        client.read_flows()
    command = Command("train", DEMO / "train.yaml", f"runs_dir={tmp_path}")
    line = command.wait_for_line("error: Prefect")
    assert re.search(rf"refuses {api}/.*: set {GIVEN}", line)
    assert command.process.wait(60.0) == 2


@pytest.mark.usefixtures("servers")
async def test_a_step_is_reported_when_the_one_before_is_drawn(tmp_path: Path) -> None:
    """Step 2 waits until the pages of step 1 are drawn. Otherwise work would pile up."""
    from prefect import flow

    from refrain.flows.step import rl_step

    config = made_up_config(tmp_path, "hollow", 64, 16)
    config.run_dir.mkdir()
    store = LocalStore(config.run_dir / "refrain.duckdb")
    may_draw = asyncio.Event()

    @flow
    async def steps() -> None:
        async with hollow_run(config, store, 2, 1000.0, None) as (live, _):
            reached, reach = live.milestones, live.milestones.drawn.reach

            async def reach_later(*args) -> None:
                await may_draw.wait()
                await reach(*args)

            reached.drawn.reach = reach_later  # type: ignore[method-assign]
            both = [
                asyncio.create_task(rl_step(step, live.ref, live.engines, reached))
                for step in (1, 2)
            ]
            await reached.published.wait(2)
            await asyncio.sleep(0.2)
            assert await store.call("last_step") == 1
            may_draw.set()
            assert [report.step for report in await asyncio.gather(*both)] == [1, 2]
            assert await store.call("last_step") == 2

    await steps()
