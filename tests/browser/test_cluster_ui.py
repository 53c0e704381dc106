"""A run on the cluster of compose.yaml, started from Prefect's pages, survives the loss of a node.

The containers are plain processes here: servers on Postgres, a head, two nodes and a worker.
"""

import json
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.browser.pages import Browser, PrefectPages
from tests.browser.test_ui import (
    RUN_TIMEOUT_S,
    arguments,
    newest_run,
    pages_of,
    rolls_out,
    sizes,
    start,
    steps_of,
    wait_until,
    watch,
)
from tests.conftest import REPOSITORY
from tests.flows.test_train import processes, query
from tests.infra.compose import Services
from tests.infra.test_monitoring import dashboard_metrics

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_STEPS, GROUP_SIZE, NUM_ENGINES = 4, 64, 3
DRAFTS = {"specactor.drafter": "ngram"}
"""Draft from the first step on, even if it does not pay, so that there are metrics of drafts."""
MACHINE = ("--num-cpus=2", "--num-gpus=2")
"""Simulated resources of a node. Engines and trainer take all GPUs of two nodes."""
METRICS_TIMEOUT_S = 60.0
NOT_HERE = {"ray_node_gram_used", "ray_vllm_num_preemptions_total"}
"""Metrics of a GPU's memory, and of an engine without room for its batch."""
SETTINGS = {"OBJECT_STORE_BYTES": str(128 * 2**20)}


@pytest.fixture
def services() -> Iterator[Services]:
    missing = [name for name in ("initdb", "postgres", "pg_isready") if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: apt-get install postgresql")
    services = Services(Path(tempfile.mkdtemp(prefix="refrain-")), SETTINGS)
    packages = REPOSITORY / "infra" / "requirements" / "cluster.txt"
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--requirements", str(packages)]
    subprocess.run(
        [f"{REPOSITORY}/.venv/bin/{install[0]}", *install[1:], "--target", "packages"],
        cwd=services.directory,
        check=True,
        timeout=300.0,
    )
    try:
        yield services
    finally:
        services.stop()
        shutil.rmtree(services.directory, ignore_errors=True)


def test_run_from_the_ui_survives_a_lost_node(
    services: Services, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import SyncPrefectClient

    for name in ("postgres", "prefect", "mlflow", "ray-head"):
        services.start(name)
    nodes = [services.start("ray-worker", *MACHINE) for _ in range(2)]
    services.start("worker")
    password, address = f"refrain:{services.password}", services.address(4200)
    pages = PrefectPages(browser, address)
    pages.log_in(password)
    browser.see("train-sync")
    run_dir = services.files / "runs" / "clustered"
    with SyncPrefectClient(f"{address}/api", auth_string=password) as client:
        changes = sizes(tmp_path, NUM_STEPS, GROUP_SIZE) | DRAFTS
        changes["rollout.num_engines"] = NUM_ENGINES
        start(pages, "clustered", changes)
        run_id = newest_run(client, "train").id
        browser.rest()
        wait_until(lambda: rolls_out(client, run_id, run_dir, 2), "in step 2", RUN_TIMEOUT_S)
        missing, deadline = shown(), time.monotonic() + METRICS_TIMEOUT_S
        while missing and time.monotonic() < deadline:
            missing -= exported(services)
        assert missing == set()
        num_lost = kill_node(without_trainers(nodes))
        watch(pages, client, run_id, "Completed")
        steps = steps_of(client, run_id)
        assert [step.name for step in steps] == [f"step {n}" for n in range(1, NUM_STEPS + 1)]
        assert {step.state.name for step in steps} == {"Completed"}
        assert [pages_of(client, step.id) for step in steps] == [["clustered-step"]] * NUM_STEPS
        assert_whole(run_dir, num_lost)
    assert_in_mlflow(services, run_dir, monkeypatch)
    assert processes(run_dir) == []


def shown() -> set[str]:
    """Return the dashboard's metrics, without those that need a GPU or do not occur here."""
    return {name for name in dashboard_metrics() if "gpu" not in name} - NOT_HERE


def exported(services: Services) -> set[str]:
    """Return the metrics that the nodes export now."""
    texts = [exposition(port) for port in services.metrics_ports]
    return {name for text in texts for name in re.findall(r"^\w+", text, re.MULTILINE)}


def exposition(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        return answer.read().decode()


def without_trainers(nodes: list[subprocess.Popen[bytes]]) -> psutil.Process:
    for node in nodes:
        process = psutil.Process(node.pid)
        children = process.children(recursive=True)
        if not any(arguments(child).startswith("ray::TrainerActor") for child in children):
            return process
    raise AssertionError("every node has a trainer rank")


def kill_node(node: psutil.Process) -> int:
    """Kill all processes of a node, as if the machine had died. Return its number of engines."""
    everything = [*node.children(recursive=True), node]
    engines = [p for p in everything if arguments(p).startswith("ray::VLLMEngine")]
    for process in everything:
        process.kill()
    assert engines
    return len(engines)


def assert_whole(run_dir: Path, num_lost: int) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["missing"]) == (NUM_STEPS, [])
    per_step = "SELECT step, count(*), count(reward) FROM rollouts JOIN rewards USING (split, step,"
    per_step += " prompt_key, sample_index) GROUP BY step ORDER BY step"
    size = 4 * GROUP_SIZE
    assert query(run_dir, per_step) == [(n, size, size) for n in range(1, NUM_STEPS + 1)]
    reports = [json.loads(one) for (one,) in query(run_dir, "SELECT report FROM steps")]
    assert sum(report["metrics"]["rollout/num_gone"] for report in reports) == num_lost
    last = query(run_dir, f"SELECT DISTINCT engine FROM rollouts WHERE step = {NUM_STEPS}")
    assert len(last) == NUM_ENGINES - num_lost


def assert_in_mlflow(services: Services, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the server on Postgres has the run, and keeps its artifacts in its folder."""
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "refrain")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", services.password)
    mlflow = MlflowClient(services.address(5000))
    run = mlflow.get_run(json.loads((run_dir / "mlflow.json").read_text())["run_id"])
    assert run.info.status == "FINISHED"
    history = mlflow.get_metric_history(run.info.run_id, "rollout/num_gone")
    assert [metric.step for metric in history] == list(range(1, NUM_STEPS + 1))
    plans = mlflow.list_artifacts(run.info.run_id, "plans")
    assert len(plans) == NUM_STEPS
    assert list((services.files / "mlflow-artifacts").rglob("train-00004.html"))
