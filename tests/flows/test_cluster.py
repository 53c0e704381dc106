"""Runs on a Ray cluster of two nodes that RAY_ADDRESS names. Here both are on one machine."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from refrain.flows.environment import LOOPBACK
from tests.conftest import REPOSITORY
from tests.flows import histories
from tests.flows.commands import Command, write_config
from tests.flows.test_train import NUM_STEPS, processes, query
from tests.sockets import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

GPUS_PER_NODE = 2
"""There are no real GPUs: Ray believes the number that it is given."""
NUM_ENGINES = 3
"""Engines and trainer take all GPUs, so no node has all engines."""
TOKENS = (
    "SELECT step, prompt_key, sample_index, response_token_ids FROM rollouts "
    f"WHERE split = 'train' AND step <= {NUM_STEPS // 2} ORDER BY ALL"
)
NUM_TRIES = 4
STOP_TIMEOUT_S = 30.0


@dataclass
class TwoNodes:
    directory: Path
    """Working directory of the nodes. The run starts in another one."""
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    head: subprocess.Popen[bytes] | None = None
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the cluster's processes. Other machines can reach a cluster, so it needs a
        token."""
        return {name: value for name, value in os.environ.items() if name not in LOOPBACK} | {
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
        }

    @property
    def driver_environment(self) -> dict[str, str]:
        return self.environment | {"RAY_ADDRESS": f"127.0.0.1:{self.port}"}

    def start(self) -> None:
        """Start a head without GPUs, to which the driver connects, and two nodes."""
        head = ("--head", "--port", str(self.port), "--include-dashboard=false")
        self.head = self._start_node("head", 0, *head, "--temp-dir", str(self.directory))
        join = ("--address", f"127.0.0.1:{self.port}")
        for i in range(2):
            self.nodes.append(self._start_node(str(i), GPUS_PER_NODE, *join))

    def place_of(self, name: str) -> Path:
        """Return the working directory of a node's processes. The nodes are 0, 1 and head."""
        return self.directory / f"at-{name}"

    def _start_node(self, name: str, num_gpus: int, *args: str) -> subprocess.Popen[bytes]:
        """Start a node, and retry: Ray gives up after 30 s, which is short on a busy machine."""
        self.place_of(name).mkdir()
        log = self.directory / f"node-{secrets.token_hex(4)}.log"
        for _ in range(NUM_TRIES):
            node = self._node(self.place_of(name), log, num_gpus, *args)
            while node.poll() is None:
                if "Ray runtime started" in log.read_text():
                    return node
                time.sleep(0.2)
        raise RuntimeError(log.read_text())

    def _node(self, place: Path, log: Path, num_gpus: int, *args: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *args]
        command += ["--num-cpus", "2", "--num-gpus", str(num_gpus)]
        command += ["--object-store-memory", str(128 * 2**20), "--disable-usage-stats"]
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=place,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def num_engines(self) -> list[int]:
        """Return the number of engines on each node."""
        counts = []
        for node in self.nodes:
            children = psutil.Process(node.pid).children(recursive=True)
            counts.append(sum("ray::VLLMEngine" in " ".join(p.cmdline()) for p in children))
        return counts

    def kill_other_than_trainers(self) -> None:
        """Kill a node that has engines but no trainer rank."""
        for node in self.nodes:
            children = psutil.Process(node.pid).children(recursive=True)
            if not any("ray::TrainerActor" in " ".join(p.cmdline()) for p in children):
                for process in [*children, node]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                return
        raise AssertionError("every node has a trainer rank")

    def stop(self) -> None:
        everything = [node for node in (self.head, *self.nodes) if node]
        for node in everything:
            node.terminate()
        for node in everything:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)


@pytest.fixture
def two_nodes() -> Iterator[TwoNodes]:
    # The path must be short: names of sockets have at most about 100 characters.
    two_nodes = TwoNodes(Path(tempfile.mkdtemp(prefix="ray-")))
    try:
        two_nodes.start()
        yield two_nodes
    finally:
        two_nodes.stop()
        shutil.rmtree(two_nodes.directory)


def test_histories_are_on_all_nodes_and_outlive_one(two_nodes: TwoNodes) -> None:
    """The nodes have separate directories under the same path."""
    found = printed_by("tests.flows.histories", two_nodes)
    assert found["trouble"] == []
    assert found["num_there"] == [len(histories.KEYS)] * 3
    assert found["nodes"] == [3, 2]
    assert found["num_built"][:2] == [len(histories.KEYS)] * 2
    assert found["num_copied"][:2] == [2 * len(histories.KEYS)] * 2
    assert [(cores, niceness >= 10) for cores, niceness in found["cores_and_niceness"]] == [
        (max(1, len(os.sched_getaffinity(0)) // 4), True)
    ] * 3
    head, *nodes = (
        {
            path.name: path.read_bytes()
            for path in (two_nodes.place_of(name) / "history").rglob("*.index")
        }
        for name in ("head", "0", "1")
    )
    assert {f"{key}.index" for key in histories.KEYS} < head.keys()
    assert nodes == [head] * 2


def test_engines_on_two_nodes_generate_as_on_one(
    two_nodes: TwoNodes, whole_run: Path, tmp_path: Path
) -> None:
    assert_gpus_are_of_one_node(two_nodes)
    command = Command(
        "train",
        write_config(tmp_path, num_epochs=1, data__validation=[]),
        "model.path=infra/demo/model",
        f"rollout.num_engines={NUM_ENGINES}",
        "placement=split",
        environment=two_nodes.driver_environment,
    )
    try:
        command.wait_for_line("train step 1: rolling out")
        assert sorted(two_nodes.num_engines()) == [1, 2]
        command.finish()
    finally:
        command.close()
    run_dir = tmp_path / "runs" / "demo"
    assert processes(run_dir) == []
    assert query(run_dir, TOKENS) == query(whole_run, TOKENS)
    engines = query(run_dir, "SELECT DISTINCT engine FROM rollouts ORDER BY ALL")
    assert engines == [(index,) for index in range(NUM_ENGINES)]


def test_run_survives_a_lost_node_with_complete_record(
    two_nodes: TwoNodes, whole_run: Path, tmp_path: Path
) -> None:
    command = Command(
        "train",
        write_config(tmp_path, num_epochs=1, data__validation=[]),
        "model.path=infra/demo/model",
        f"rollout.num_engines={NUM_ENGINES}",
        "placement=split",
        environment=two_nodes.driver_environment,
    )
    try:
        command.wait_for_line("train step 1: rolling out")
        two_nodes.kill_other_than_trainers()
        command.wait_for_line("going on with 1 of 3 engines")
        command.finish()
    finally:
        command.close()
    run_dir = tmp_path / "runs" / "demo"
    assert query(run_dir, TOKENS) == query(whole_run, TOKENS)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["steps"], summary["missing"]) == (NUM_STEPS // 2, [])
    reports = [json.loads(report) for (report,) in query(run_dir, "SELECT report FROM steps")]
    assert sum(report["metrics"]["rollout/num_gone"] for report in reports) == 2
    assert processes(run_dir) == []


def assert_gpus_are_of_one_node(two_nodes: TwoNodes) -> None:
    held = printed_by("tests.flows.pools", two_nodes)
    assert len(set(held["nodes"])) == 2
    assert held["gpu_ids"] == [[0, 1], [0, 1]]
    assert "no node had 1 free GPUs" in held["refusal"]
    assert len(set(held["ranks"])) == 1, "the trainer ranks are on two nodes"
    assert held["engine"] not in held["ranks"]


def printed_by(module: str, two_nodes: TwoNodes) -> dict[str, Any]:
    """Run a driver on the cluster and return the JSON that it prints. Ignore Ray's messages about a
    dead node."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=REPOSITORY,
        env=two_nodes.driver_environment,
        capture_output=True,
        text=True,
        timeout=300.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("{"))
    return json.loads(said)
