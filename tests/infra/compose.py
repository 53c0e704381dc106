"""Run the services of compose.yaml as plain processes of this machine.

Commands, environments and health checks are those of compose.yaml. The image's variables come from
the Dockerfile, and every server gets a free port.
"""

import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from tests.conftest import REPOSITORY
from tests.sockets import free_port

CLUSTER = REPOSITORY / "infra" / "cluster"
NODES = ("ray-head", "ray-worker", "worker")
HEALTHY_S = 240.0
STOPPED_S = 60.0
_VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")
_SERVERS = re.compile(r"\b(?:postgres|prefect|mlflow|ray-head)(?=:\d)")
_PORTS = re.compile(r"\b(?:5432|4200|5000|6379|8080)\b")
_METRICS = "8080"
_ROOT_IS_REFUSED = ("runuser", "--user", "postgres", "--")


class Services:
    """Services that a test starts one by one, in the order of dependencies. `stop` ends all."""

    def __init__(self, directory: Path, settings: Mapping[str, str]) -> None:
        """`directory` is for the services' files. Its path must be short: Ray has sockets there.
        `settings` are the variables of .env, without its secrets."""
        self.directory = directory
        self.files = directory / "files"
        self.files.mkdir()
        self.password, self.token = (secrets.token_hex(16) for _ in range(2))
        self._settings = {
            "POSTGRES_PASSWORD": secrets.token_hex(16),
            "PREFECT_PASSWORD": self.password,
            "MLFLOW_PASSWORD": self.password,
            "RAY_AUTH_TOKEN": self.token,
            **settings,
        }
        self.metrics_ports: list[int] = []
        """Ports of the nodes' metrics, in the order of their start."""
        self._ports: dict[str, int] = {}
        services = yaml.safe_load((CLUSTER / "compose.yaml").read_text())["services"]
        self._services: dict[str, dict[str, Any]] = services
        self._started: list[subprocess.Popen[bytes]] = []

    def address(self, port: int) -> str:
        return f"http://127.0.0.1:{self._port(str(port))}"

    def start(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a service and wait until it is healthy. For a node, `more` sets its resources, for
        example --num-gpus=2."""
        service = self._services[name]
        if name in NODES:
            self.metrics_ports.append(free_port())
        command = service.get("command") or self._make_database()
        log = self.directory / f"{name}-{len(self._started)}.log"
        process = self._run([*map(self._here, command), *more], service, log)
        self._started.append(process)
        deadline = time.monotonic() + HEALTHY_S
        while not self._is_healthy(name, log):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, f"{name} is not healthy"
            time.sleep(0.5)
        return process

    def processes(self) -> list[psutil.Process]:
        """Return all processes that the services started, also those that left their group."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("COMPOSE_DIRECTORY") == str(self.directory):
                    found.append(process)
        return found

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOPPED_S)
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _is_healthy(self, name: str, log: Path) -> bool:
        """Return whether the probe passes. Check a node's log first: on one machine, its probe also
        sees other nodes' daemons, and nodes that start together would take the same socket."""
        if name in NODES and "Ray runtime started" not in log.read_text():
            return False
        service = self._services[name]
        return not self._run(self._probe(service), service, self.directory / "probes.log").wait(30)

    def _run(
        self, command: Sequence[str], service: Mapping[str, Any], log: Path
    ) -> subprocess.Popen[bytes]:
        given = service.get("environment") or {}
        own = {name: self._here(text) for name, text in given.items() if text is not None}
        with log.open("ab") as output:
            return subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=self._image() | own,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _probe(self, service: Mapping[str, Any]) -> list[str]:
        kind, *test = map(self._here, service["healthcheck"]["test"])
        if kind == "CMD-SHELL":
            return ["bash", "-c", f"{test[0]} -h 127.0.0.1 -p {self._port('5432')}"]
        return test

    def _image(self) -> dict[str, str]:
        """Return the variables that the Dockerfile sets, with paths of this machine."""
        text = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ")
        (line,) = (line for line in text.splitlines() if line.startswith("ENV "))
        given = dict(item.split("=", 1) for item in shlex.split(line)[1:])
        packages = f"{REPOSITORY}/.venv/bin"
        path = given["PATH"].replace("/opt/refrain/.venv/bin", packages)
        return given | {
            "PATH": path.replace("$PATH", os.environ["PATH"]),
            "PYTHONPATH": str(self.directory / "packages"),
            "HOME": str(self.directory),
            "RAY_TMPDIR": str(self.directory),
            "COMPOSE_DIRECTORY": str(self.directory),
        }

    def _here(self, text: object) -> str:
        def value(variable: re.Match[str]) -> str:
            return self._settings.get(variable[1], variable[2] or "")

        known = _SERVERS.sub("127.0.0.1", _VARIABLE.sub(value, str(text)))
        return _PORTS.sub(lambda port: str(self._port(port[0])), known).replace(
            "/files", str(self.files)
        )

    def _port(self, port: str) -> int:
        """Return the free port that replaces a port of compose.yaml. For metrics, it is the newest
        node's."""
        if port == _METRICS:
            return self.metrics_ports[-1]
        return self._ports.setdefault(port, free_port())

    def _make_database(self) -> list[str]:
        """Create the databases, as the entry point of Postgres's image does. Return the server's
        command."""
        as_postgres = _ROOT_IS_REFUSED if os.geteuid() == 0 else ()
        place, password = self.directory / "postgres", self.directory / "postgres.password"
        place.mkdir()
        password.write_text(self._settings["POSTGRES_PASSWORD"])
        if as_postgres:
            self.directory.chmod(0o755)
            for path in (place, password):
                shutil.chown(path, "postgres")
        data, port = place / "data", str(self._port("5432"))
        at_home = {"cwd": place, "check": True, "timeout": 120.0, "capture_output": True}
        initdb = ["initdb", "-D", data, "-U", "refrain", "-A", "scram-sha-256"]
        subprocess.run([*as_postgres, *initdb, f"--pwfile={password}"], **at_home)
        # Single-user mode reads statements from standard input, without a server.
        alone = [*as_postgres, "postgres", "--single", "-D", data, "postgres"]
        made = b"CREATE DATABASE prefect;\nCREATE DATABASE mlflow;\n"
        subprocess.run(alone, input=made, **at_home)
        listens = ("-c", "listen_addresses=127.0.0.1", "-c", f"unix_socket_directories={place}")
        return [*as_postgres, "postgres", "-D", str(data), "-p", port, *listens]
