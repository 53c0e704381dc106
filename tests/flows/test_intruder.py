"""Another user of the machine cannot read or write a live run, nor the servers of `refrain ui`.

A script tries files, sockets, Ray, `refrain sql`, Prefect and MLflow. In the negative controls the
same script gets in, so it would notice an open door.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from refrain.engines.private import private_path
from refrain.engines.tracking.mlflow_client import open_client
from refrain.flows.auth import ASKED, GIVEN, MLFLOW_ASKED
from refrain.flows.ui import HOST, mlflow_command, servers, service, use_servers, wait_for
from refrain.tasks.run.run_dir import REF_FILE
from tests.conftest import REPOSITORY
from tests.flows.commands import Command, write_config
from tests.flows.test_auth import auth_header
from tests.flows.test_train import processes
from tests.intruder import SECRET
from tests.sockets import free_port

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user"),
]
NOBODY = 65534
STOP_S = 120.0
Findings = list[tuple[str, str]]


def intrude(targets: dict[str, Any], user: int = NOBODY) -> Findings:
    done = subprocess.run(
        [sys.executable, "-m", "tests.intruder", str(user)],
        input=json.dumps(targets),
        capture_output=True,
        text=True,
        timeout=900.0,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    return [(what, how) for what, how in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def live() -> Iterator[Path]:
    """Start a run in a directory that everybody may read. Return its directory when it rolls
    out."""
    directory = Path(tempfile.mkdtemp(prefix="live", dir="/tmp"))
    directory.chmod(0o755)
    before = os.umask(0o022)
    (directory / "open").touch()
    environment = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "TMPDIR")}
    # The run must take longer than the script.
    config = write_config(directory, num_epochs=40)
    command = Command("train", config, environment=environment)
    try:
        command.wait_for_line("train step 1: rolling out")
        yield directory / "runs" / "demo"
    finally:
        os.umask(before)
        command.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.process.wait(STOP_S)
        command.close()
        shutil.rmtree(directory, ignore_errors=True)


def targets_of(run_dir: Path) -> dict[str, Any]:
    """Return all sockets and ports of a run's processes, and all its files and directories."""
    ports, sockets = set(), set()
    for process in processes(run_dir):
        for one in process.net_connections("all"):
            if one.status == psutil.CONN_LISTEN:
                ports.add(one.laddr.port)
            elif isinstance(one.laddr, str) and one.laddr:
                sockets.add(one.laddr)
    shared = Path("/dev/shm").glob("*refrain-*")
    places = [run_dir.parent, private_path("ray").parent, *shared]
    paths = [path for place in places for path in (place, *place.rglob("*"))]
    return {
        "files": [str(path) for path in paths if path.is_file()],
        "directories": [str(path) for path in paths if path.is_dir()],
        "sockets": sorted(sockets),
        "ports": sorted(ports),
    }


def test_nothing_of_a_live_run_is_reached(live: Path) -> None:
    targets = targets_of(live)
    assert len(targets["files"]) > 20
    # Prefect has one port, and so has each of Ray's servers and actors.
    assert len(targets["ports"]) >= 8
    assert any(name.startswith("@refrain-sql") for name in targets["sockets"])
    assert any("plasma_store" in name for name in targets["sockets"])
    door = str(live.parents[1] / "open")
    targets["files"].append(door)
    assert intrude(targets) == [(door, "read")]


def test_the_runs_own_user_reaches_all_of_it(live: Path) -> None:
    """Negative control: the script does find these things when it may."""
    targets = targets_of(live)
    token = json.loads((live / REF_FILE).read_text())["ray_token"]
    found = intrude({**targets, "token": Path(token).read_text()}, user=0)
    reached = {what for what, _ in found}
    assert {str(live / "refrain.duckdb"), str(live), token} <= reached
    assert [name for name in targets["sockets"] if name in reached and "plasma" in name]
    assert [name for name in targets["sockets"] if name in reached and "@refrain-sql" in name]
    assert [what for what, how in found if how == "NodeInfoGcsService/GetClusterId"]


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """Return a directory of the user. The runs beside it have an MLflow artifact with a secret."""
    with mock.patch.dict(os.environ):
        for name in (ASKED, GIVEN, MLFLOW_ASKED):
            os.environ.pop(name, None)
        use_servers(tmp_path / "runs", free_port())
        client, _ = open_client(tmp_path / "runs", None)
        place = (tmp_path / "runs" / "mlflow-artifacts").as_uri()
        run = client.create_run(client.create_experiment("theirs", artifact_location=place))
        client.log_text(run.info.run_id, SECRET, "key")
        directory = tmp_path / "ssh"
        directory.mkdir(0o700)
        yield directory


def test_nothing_is_reached_through_servers(victim: Path) -> None:
    ports = free_port(), free_port()
    mlflow = f"http://{HOST}:{ports[1]}"
    targets = {"mlflow": mlflow, "victim": str(victim), "ports": ports}
    with servers(victim.parent / "runs", *ports):
        assert intrude(targets) == []
        assert list(victim.rglob("*")) == []
        known = {"mlflow": mlflow, "victim": str(victim), "words": auth_header()}
        assert (mlflow, "read the key") in intrude(known), "cannot be read with the password"


def test_a_server_without_a_password_is_robbed(victim: Path) -> None:
    port = free_port()
    command = mlflow_command(victim.parent / "runs", port)
    for option in ("--app-name", command[command.index("--app-name") + 1], "--no-serve-artifacts"):
        command.remove(option)
    url = f"http://{HOST}:{port}"
    with ExitStack() as stack:
        running = stack.enter_context(service("MLflow", command, victim.parent / "log"))
        wait_for(f"{url}/health", [running])
        found = intrude({"mlflow": url, "victim": str(victim)})
    assert {(url, "read the key"), (url, "wrote authorized_keys")} <= set(found)
    assert list(victim.rglob("authorized_keys")), "the server wrote no file for the intruder"
