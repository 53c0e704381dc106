"""Prefect's server of a run's own: there from its start to its end, whatever kills it."""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
    from prefect.server.api.server import SubprocessASGIServer

    # There is one for all clients that are given no address.
    server = SubprocessASGIServer()
    server.start()
    over = threading.Event()
    looking = threading.Thread(
        target=_keep_alive, args=(server, over), daemon=True, name="Prefect's server"
    )
    looking.start()
    try:
        yield
    finally:
        over.set()


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
