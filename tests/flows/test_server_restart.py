"""A run restarts its own Prefect server when it dies. If a server stays away, the run waits for a
while and then says how to resume."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import httpx
import pytest

from refrain.flows import launch
from refrain.flows.environment import use_embedded_services
from refrain.flows.launch import _result
from tests.conftest import REPOSITORY

KILLED_TWICE = """
import os, signal, sys
from pathlib import Path
from refrain.flows.environment import use_embedded_services
from refrain.flows.launch import _result

use_embedded_services(Path(sys.argv[1]))
from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer

@task
async def double(number):
    return 2 * number

@flow
async def double_all(numbers):
    doubled = []
    for number in numbers:
        doubled.append(await double(number))
        if number:
            os.kill(SubprocessASGIServer().server_process.pid, signal.SIGKILL)
    return doubled

async def look():
    async with get_client() as client:
        return [run.state_name for run in await client.read_flow_runs()]

print("doubled", _result(double_all([0, 1, 2])))
print("states", _result(look()))
"""


@pytest.mark.engine
@pytest.mark.slow
def test_killed_server_of_the_run_restarts(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", KILLED_TWICE, str(tmp_path)],
        cwd=REPOSITORY,
        env=kept,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "doubled [0, 2, 4]" in done.stdout
    assert "states ['Completed']" in done.stdout
    assert done.stdout.count("Prefect's server was killed or crashed (-9)") >= 1


@pytest.mark.parametrize(
    ("url", "retries"), [(None, "5"), ("http://prefect:4200/api", "8")], ids=["own", "another"]
)
def test_a_run_waits_less_long_for_a_server_of_its_own(
    url: str | None, retries: str, tmp_path: Path
) -> None:
    """Its own server is back within seconds, or not before the run is resumed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    with mock.patch.dict(os.environ, kept | ({"PREFECT_API_URL": url} if url else {}), clear=True):
        use_embedded_services(tmp_path)
        assert os.environ["PREFECT_CLIENT_MAX_RETRIES"] == retries


def test_server_death_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flow() -> None:
        raise httpx.ConnectError("All connection attempts failed")

    # The flow needs no server, and its start takes ten seconds.
    monkeypatch.setattr(launch, "own_server", nullcontext)
    with pytest.raises(RuntimeError, match=r"server does not answer any more.* with --resume"):
        _result(flow())
