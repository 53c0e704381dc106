"""Fixtures that start `refrain ui` and a browser, once for each module."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from refrain.flows.auth import password_file
from tests.browser.pages import CHROMIUM, DRIVER, Browser, chromium
from tests.flows.commands import Command
from tests.sockets import free_port

STOP_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Ui:
    command: Command
    runs_dir: Path
    prefect: str
    mlflow: str

    @property
    def api(self) -> str:
        return f"{self.prefect}/api"

    @property
    def password(self) -> str:
        return password_file(self.runs_dir).read_text().strip()

    def stop(self) -> list[psutil.Process]:
        """Stop it with SIGTERM, as a supervisor would. Return the processes that are left."""
        services = psutil.Process(self.command.process.pid).children(recursive=True)
        self.command.process.send_signal(signal.SIGTERM)
        self.command.process.wait(STOP_TIMEOUT_S)
        return psutil.wait_procs(services, timeout=5.0)[1]


@pytest.fixture(scope="module")
def ui(tmp_path_factory: pytest.TempPathFactory, browser: Browser) -> Iterator[Ui]:
    # Skip before `refrain ui` starts if there is no browser.
    del browser
    runs_dir = tmp_path_factory.mktemp("ui") / "runs"
    prefect, mlflow = free_port(), free_port()
    ports = ("--prefect-port", prefect, "--mlflow-port", mlflow)
    strange = ("PREFECT_", "RAY_ADDRESS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(strange)}
    command = Command("ui", "--runs-dir", runs_dir, *map(str, ports), environment=environment)
    try:
        command.wait_for_line(f"the password in {password_file(runs_dir)}")
        command.wait_for_line("Ctrl-C")
        yield Ui(command, runs_dir, *(f"http://127.0.0.1:{port}" for port in (prefect, mlflow)))
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            left = psutil.Process(command.process.pid).children(recursive=True)
            command.close()
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if not (CHROMIUM and DRIVER):
        missing = "no chromium and chromedriver here: apt-get install chromium chromium-driver"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
