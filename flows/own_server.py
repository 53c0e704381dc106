"""Prefect's server of a run's own: there from the run's start to its end, whatever kills it."""

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from prefect.server.api.server import SubprocessASGIServer

LOOK_S = 1.0
"""Seconds between two looks at it."""


@contextmanager
def own_server() -> Generator[None]:
    """A server for Prefect's clients in this process, unless PREFECT_API_URL names one. When it
    dies it is started again at its address, on its database; calls are tried again meanwhile."""
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
        # It ends with this process: Prefect sends it the last logs when Python exits.
        over.set()


def api_url() -> str:
    """Address of the server that Prefect's clients in this process use."""
    from prefect.server.api.server import SubprocessASGIServer

    return os.environ.get("PREFECT_API_URL") or SubprocessASGIServer().api_url


def _make_server() -> "SubprocessASGIServer":
    """The one server for all clients that are given no address."""
    import prefect
    from prefect.server.api.server import SubprocessASGIServer
    from prefect.settings import get_current_settings

    class Server(SubprocessASGIServer):
        """A server in a session of its own. A terminal sends Ctrl-C to all of its processes, and
        the run still has to report its end to this one."""

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            given = get_current_settings().to_environment_variables(exclude_unset=True)
            own = {
                "PREFECT_UI_ENABLED": "0",
                "PREFECT__SERVER_EPHEMERAL": "1",
                "PREFECT__SERVER_FINAL": "1",
            }
            command = [sys.executable, "-m", "uvicorn", "--factory"]
            command += ["--app-dir", str(prefect.__module_path__.parent)]
            command += ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "error"]
            return subprocess.Popen(
                [*command, "--lifespan", "on", "prefect.server.api.server:create_app"],
                env={**os.environ, **own, **given},
                start_new_session=True,
            )

    return Server()


def _keep_alive(server: "SubprocessASGIServer", over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        process = server.server_process
        if process is None or process.poll() is None:
            continue
        print(f"Prefect's server was killed or crashed ({process.returncode}): starting another")
        server.running = False  # As it has it before the first start.
        try:
            server.start()
        except (RuntimeError, httpx.HTTPError) as error:
            print(f"Prefect's server did not start again: {error}")
