"""A run's own Prefect server. It is restarted when it dies, and ends with the run."""

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

APP = "refrain.flows.prefect_app:create_app"
"""What the server's process runs."""
LOOK_S = 1.0
"""Seconds between two checks of the server."""


@contextmanager
def own_server() -> Generator[None]:
    """Run a server for Prefect's clients in this process, unless PREFECT_API_URL is set.

    When the server dies, restart it with the same address and database. Clients retry their calls
    in the meantime.
    """
    if os.environ.get("PREFECT_API_URL"):
        yield
        return
    server = _make_server()
    server.start()
    over = threading.Event()
    looking = threading.Thread(
        target=_keep_alive, args=(server, over), daemon=True, name="Prefect's server"
    )
    looking.start()
    try:
        yield
    finally:
        # Do not stop the server here: Prefect sends the last logs to it when Python exits.
        over.set()


def api_url() -> str:
    """Return the URL of the server that Prefect's clients in this process use."""
    from prefect.server.api.server import SubprocessASGIServer

    return os.environ.get("PREFECT_API_URL") or SubprocessASGIServer().api_url


def _make_server() -> "SubprocessASGIServer":
    """Return the server for all clients without an explicit address."""
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    class Server(SubprocessASGIServer):
        """A server in a separate session, so that Ctrl-C in a terminal does not reach it. The run
        still has to report its end to the server."""

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            given = get_current_settings().to_environment_variables(exclude_unset=True)
            own = {
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT__SERVER_FINAL": "1",
            }
            command = [sys.executable, "-m", "uvicorn", "--factory"]
            command += ["--app-dir", str(Path(__file__).parents[2])]
            command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error"]
            return subprocess.Popen(
                [*command, "--lifespan", "on", APP],
                env={**os.environ, **own, **given},
                start_new_session=True,
            )

    return Server()


def _keep_alive(server: "SubprocessASGIServer", over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        process = server.server_process
        if process is None or process.poll() is None:
            continue
        print(f"Prefect's server was killed or crashed ({process.returncode}): restarting it")
        server.running = False  # The state before the first start, which `start` needs.
        try:
            server.start()
        except (RuntimeError, httpx.HTTPError) as error:
            print(f"Prefect's server did not restart: {error}")
