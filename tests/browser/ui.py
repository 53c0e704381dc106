"""Start `refrain ui` on free ports, and stop it."""

import contextlib
import os
import signal
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

import psutil

from refrain.flows.auth import password_file
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


@contextlib.contextmanager
def served_ui(runs_dir: Path) -> Generator[Ui]:
    """Serve until the block ends, then kill what is left."""
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
