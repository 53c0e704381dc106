"""Run Prefect's server, a worker and MLflow's UI as child processes on this machine."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from refrain.engines.paths import check_place
from refrain.engines.tracking.mlflow_client import MLFLOW_PAGE
from refrain.flows.auth import MLFLOW_ASKED, ORIGINS, mlflow_password, password_place
from refrain.flows.deployments import POOL, check_directory, client_of, deploy, prefect_command
from refrain.flows.environment import use_embedded_services

if TYPE_CHECKING:
    from uuid import UUID

    from prefect.client.orchestration import SyncPrefectClient

HOST = "127.0.0.1"
MLFLOW_APP = "refrain"
"""Name of `flows.mlflow_app` among MLflow's apps (pyproject.toml)."""
START_TIMEOUT_S = 300.0
_STOP_TIMEOUT_S = 60.0
"""Seconds to wait until a service has stopped. Prefect kills a cancelled run after 30 s, so this is
longer."""


def serve(runs_dir: Path, prefect_port: int, mlflow_port: int) -> None:
    """Serve until interrupted or until a service ends, then stop all services.

    Raise ValueError outside the project's directory and when a port is in use, and the errors of
    `services`.
    """
    check_directory()
    check_place(runs_dir, f"--runs-dir {runs_dir}")
    _check_port_is_free("--prefect-port", prefect_port)
    _check_port_is_free("--mlflow-port", mlflow_port)
    _check_mlflow_app()
    # A shell's background jobs ignore SIGINT. The worker would inherit that and never stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("starting Prefect's server, a worker and MLflow's UI", flush=True)
    with (
        contextlib.suppress(KeyboardInterrupt),
        services(runs_dir, prefect_port, mlflow_port) as running,
    ):
        print(f"Prefect  http://{HOST}:{prefect_port}  (for example Deployments > train > Run)")
        print(f"MLflow   http://{HOST}:{mlflow_port}")
        user = mlflow_password().partition(":")[0]
        print(f"Both need the password in {password_place(runs_dir)}. Enter the whole line in")
        print(f"Prefect. In MLflow, the user is {user} and the password follows the colon.")
        print("Ctrl-C stops both, and the current run, which you can resume.", flush=True)
        while True:
            _check_alive(running)
            time.sleep(1.0)


@dataclass(frozen=True)
class Service:
    """A child process."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path | None = None
    """File with its output. None: the output goes to the terminal."""


@contextlib.contextmanager
def services(runs_dir: Path, prefect_port: int, mlflow_port: int) -> Generator[list[Service]]:
    """Start all services and yield them. The worker starts last and stops first.

    Raise ValueError when these runs are served already, and RuntimeError when a service does not
    start.
    """
    api = f"http://{HOST}:{prefect_port}/api"
    _set_environment(runs_dir, prefect_port, mlflow_port)
    with contextlib.ExitStack() as stack:
        stack.callback(_claim(runs_dir).release)
        running = stack.enter_context(servers(runs_dir, prefect_port, mlflow_port))
        _settle_runs(api)
        deploy(api, runs_dir)
        running.append(stack.enter_context(service("the worker", worker_command())))
        # Cancel the runs first: a stopping worker waits until its runs have ended.
        stack.callback(_cancel_runs, api)
        yield running


@contextlib.contextmanager
def servers(runs_dir: Path, prefect_port: int, mlflow_port: int) -> Generator[list[Service]]:
    """Start Prefect's and MLflow's servers and wait until both answer. Raise RuntimeError when one
    does not."""
    logs = runs_dir / ".prefect"
    prefect, mlflow = server_command(prefect_port), mlflow_command(runs_dir, mlflow_port)
    with (
        service("Prefect's server", prefect, logs / "server.log") as one,
        service("MLflow's UI", mlflow, logs / "mlflow.log") as other,
    ):
        wait_for(f"http://{HOST}:{prefect_port}/api/health", [one, other])
        wait_for(f"http://{HOST}:{mlflow_port}/health", [one, other])
        yield [one, other]


def _claim(runs_dir: Path) -> FileLock:
    lock = FileLock(runs_dir / ".prefect" / "ui.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise ValueError(
            f"another `refrain ui` serves the runs in {runs_dir} already: stop it, or give another "
            "--runs-dir"
        ) from error
    return lock


def _set_environment(runs_dir: Path, prefect_port: int, mlflow_port: int) -> None:
    use_servers(runs_dir, prefect_port)
    # Runs write MLflow's files directly. Their pages link to this address.
    os.environ.setdefault(MLFLOW_PAGE, f"http://{HOST}:{mlflow_port}")
    os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", "3")
    os.environ.setdefault("PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT", "false")


def use_servers(runs_dir: Path, prefect_port: int) -> None:
    """Let this process and its children use the servers of `servers`, even if PREFECT_API_URL is
    set to another one."""
    os.environ.pop("PREFECT_API_URL", None)
    use_embedded_services(runs_dir)
    os.environ["PREFECT_API_URL"] = f"http://{HOST}:{prefect_port}/api"
    # MLflow's job execution takes 0.6 GB of memory, and refrain does not use it.
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    os.environ[MLFLOW_ASKED] = mlflow_password()


def server_command(port: int) -> list[str]:
    """Return the command that starts Prefect's server."""
    # For some pages the server asks GitHub, and falls back to files that it ships. No setting turns
    # that off. A proxy that does not exist does, even before a name lookup.
    offline = f"https_proxy=http://{HOST}:9"
    # By default, any page in a browser on this machine could read the server's responses.
    pages = os.environ.get(ORIGINS) or f"http://{HOST}:{port},http://localhost:{port}"
    command = prefect_command("server", "start", "--host", HOST, "--port", str(port))
    return ["env", offline, f"{ORIGINS}={pages}", *command]


def worker_command() -> list[str]:
    """Return the command that starts Prefect's worker."""
    # Always use the same name, or the pool's page lists every worker of the past. Limit the worker
    # too: the pool's limit does not count a run that is being cancelled, the worker's limit does.
    one = ("--pool", POOL, "--name", "this machine", "--limit", "1")
    return prefect_command("worker", "start", *one)


def mlflow_command(runs_dir: Path, port: int) -> list[str]:
    """Return the command that starts MLflow's server on the files that runs in this directory
    write. Clients need the password in the environment variable `MLFLOW_ASKED`."""
    # The same places as in `engines.tracking.mlflow_client`.
    store = f"sqlite:///{runs_dir.absolute()}/mlflow.db"
    artifacts = (runs_dir.absolute() / "mlflow-artifacts").as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
    command += ["--default-artifact-root", artifacts, "--workers", "1"]
    # Runs write artifacts directly, so nobody needs to write any through the server.
    command += ["--no-serve-artifacts", "--app-name", MLFLOW_APP]
    # MLflow's default list has 10.*, which matches any site whose name begins with "10.".
    hosts = os.environ.get("MLFLOW_SERVER_ALLOWED_HOSTS") or f"{HOST}:*,localhost:*"
    command += ["--allowed-hosts", hosts]
    return [*command, "--host", HOST, "--port", str(port)]


def _settle_runs(api: str) -> None:
    """Mark runs of a killed worker as crashed. Otherwise they would keep the pool's slot."""
    from prefect.states import Crashed

    crashed = Crashed(message="The worker was killed; start again with resume.")
    with client_of(api) as client:
        for run_id in _live_runs(client):
            client.set_flow_run_state(run_id, crashed, force=True)


def _cancel_runs(api: str) -> None:
    """Cancel the current runs and wait until they have ended."""
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    # If the server does not answer, skip this: the worker and its runs are killed later.
    from prefect.states import Cancelling

    with contextlib.suppress(OSError), client_of(api) as client:
        for run_id in _live_runs(client):
            cancelling = Cancelling(message="The services were stopped.")
            client.set_flow_run_state(run_id, cancelling)
        while _live_runs(client) and time.monotonic() < deadline:
            time.sleep(0.5)


def _live_runs(client: "SyncPrefectClient") -> "list[UUID]":
    from prefect.client.schemas.filters import FlowRunFilter, WorkPoolFilter

    live = ["PENDING", "RUNNING", "CANCELLING"]
    found = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate({"state": {"type": {"any_": live}}}),
        work_pool_filter=WorkPoolFilter.model_validate({"name": {"any_": [POOL]}}),
    )
    return [run.id for run in found]


@contextlib.contextmanager
def service(
    name: str,
    command: Sequence[str],
    log: Path | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Generator[Service]:
    """Run a child process during the block, then stop all processes of its session. `env` replaces
    this process's environment."""
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("wb")) if log else None
        # In a separate session, an interrupt reaches the child only once, from this process.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if log else None,
            start_new_session=True,
            cwd=cwd,
            env=env,
        )
        try:
            yield Service(name, process, log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT_S)
    finally:
        # Kill what is left of the session. A second interrupt during the wait also leads here.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(url: str, running: Sequence[Service]) -> None:
    """Wait until `url` answers. Raise RuntimeError when it does not, or when a service ended."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        _check_alive(running)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(url, timeout=5.0)
            return
        time.sleep(0.5)
    raise RuntimeError(f"{url} did not answer in {START_TIMEOUT_S:.0f} s")


def _check_alive(running: Sequence[Service]) -> None:
    for service in running:
        if service.process.poll() is not None:
            where = f"its output is in {service.log}" if service.log else "its output is above"
            raise RuntimeError(
                f"{service.name} ended with status {service.process.returncode}; {where}"
            )


def _check_mlflow_app() -> None:
    if MLFLOW_APP not in entry_points(group="mlflow.app").names:
        raise ValueError(
            "the installed version of refrain has no password for MLflow: run `make setup` or "
            "`pip install --no-deps -e .`, then start again"
        )


def _check_port_is_free(option: str, port: int) -> None:
    with socket.socket() as probe:
        # Servers set this option too. It allows a port whose server has just ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be used ({error.strerror}): stop what uses it, or give "
                f"another {option}"
            ) from error
