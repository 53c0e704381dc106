"""A run on a Ray cluster of two nodes that RAY_ADDRESS names: here both are on one machine."""

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

import psutil
import pytest

from flows.environment import LOOPBACK
from tests.conftest import REPOSITORY
from tests.flows.commands import Command, write_config
from tests.flows.test_train import NUM_STEPS, processes, query
from tests.listening import free_port

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

GPUS_PER_NODE = 2
"""There are none: Ray counts what it is told."""
NUM_ENGINES = 3
"""With the trainer they take all GPUs, so that no node has all engines."""
NUM_TRIES = 4
STOP_TIMEOUT_S = 30.0


@dataclass
class TwoNodes:
    directory: Path
    """Where they work: not where the run is started."""
    port: int = field(default_factory=free_port)
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """Of what belongs to the cluster, which reaches beyond one machine: so it wants a token."""
        return {name: value for name, value in os.environ.items() if name not in LOOPBACK} | {
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
        }

    @property
    def driver_environment(self) -> dict[str, str]:
        return self.environment | {"RAY_ADDRESS": f"127.0.0.1:{self.port}"}

    def start(self) -> None:
        head = ("--head", "--port", str(self.port), "--include-dashboard=false")
        self._start_node(*head, "--temp-dir", str(self.directory))
        self._start_node("--address", f"127.0.0.1:{self.port}")

    def _start_node(self, *args: str) -> None:
        """Ray itself gives up after 30 s, which are few on a busy machine."""
        log = self.directory / f"node-{len(self.nodes)}.log"
        for _ in range(NUM_TRIES):
            node = self._node(log, *args)
            while node.poll() is None:
                if "Ray runtime started" in log.read_text():
                    self.nodes.append(node)
                    return
                time.sleep(0.2)
        raise RuntimeError(log.read_text())

    def _node(self, log: Path, *args: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *args]
        command += ["--num-cpus", "2", "--num-gpus", str(GPUS_PER_NODE)]
        command += ["--object-store-memory", str(128 * 2**20), "--disable-usage-stats"]
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=self.directory,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def num_engines(self) -> list[int]:
        """By node."""
        counts = []
        for node in self.nodes:
            children = psutil.Process(node.pid).children(recursive=True)
            counts.append(sum("ray::VLLMEngine" in " ".join(p.cmdline()) for p in children))
        return counts

    def stop(self) -> None:
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)


@pytest.fixture
def two_nodes() -> Iterator[TwoNodes]:
    # Short: the names of Ray's sockets may have a hundred letters.
    two_nodes = TwoNodes(Path(tempfile.mkdtemp(prefix="ray-")))
    try:
        two_nodes.start()
        yield two_nodes
    finally:
        two_nodes.stop()
        shutil.rmtree(two_nodes.directory)


def test_engines_on_two_nodes_generate_as_on_one(
    two_nodes: TwoNodes, whole_run: Path, tmp_path: Path
) -> None:
    assert_pools_are_on_one_node_each(two_nodes)
    command = Command(
        "train",
        write_config(tmp_path, num_epochs=1, data__validation=[]),
        "model.path=infra/demo/model",
        f"rollout.num_engines={NUM_ENGINES}",
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
    tokens = (
        "SELECT step, prompt_key, sample_index, response_token_ids FROM rollouts "
        f"WHERE split = 'train' AND step <= {NUM_STEPS // 2} ORDER BY ALL"
    )
    assert query(run_dir, tokens) == query(whole_run, tokens)
    engines = query(run_dir, "SELECT DISTINCT engine FROM rollouts ORDER BY ALL")
    assert engines == [(index,) for index in range(NUM_ENGINES)]


def assert_pools_are_on_one_node_each(two_nodes: TwoNodes) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.flows.pools"],
        cwd=REPOSITORY,
        env=two_nodes.driver_environment,
        capture_output=True,
        text=True,
        timeout=300.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    held = json.loads(done.stdout.splitlines()[-1])
    assert len(set(held["nodes"])) == 2
    assert held["gpu_ids"] == [[0, 1], [0, 1]]
    assert "1 GPUs of one node" in held["refusal"]
