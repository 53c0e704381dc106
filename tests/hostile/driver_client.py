"""The tests' side of tests.hostile.driver: start it and send it commands."""

import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conftest import REPOSITORY

START_S = 240.0
ANSWER_S = 20.0
"""Longer than the driver's own limit. A command that takes longer hangs outside Python."""
NOBODY = 65534


@dataclass(frozen=True)
class Answer:
    code: int | None
    output: str
    seconds: float
    started: bool = False
    hung: bool = False
    trace: str | None = None


class Driver:
    """A process that runs commands in a directory. It is restarted when a command hangs."""

    def __init__(self, directory: Path, shim: Path | None = None, user: int | None = None) -> None:
        self._directory, self._shim, self._user = directory, shim, user
        self._process: subprocess.Popen[str] | None = None

    def ask(self, *args: str, **request: Any) -> Answer:
        process = self._process or self._start()
        assert process.stdin
        process.stdin.write(json.dumps({"args": args, **request}) + "\n")
        process.stdin.flush()
        line = self._line(ANSWER_S)
        if line is None:
            self.close()
            return Answer(None, "hung outside Python", ANSWER_S, hung=True)
        if not line:
            code = process.wait(30)
            self.close()
            return Answer(code, "", 0.0, trace=f"the process died ({code})")
        return Answer(**json.loads(line))

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(30)
        self._process = None

    def _start(self) -> "subprocess.Popen[str]":
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "RAY_"))
        }
        environment |= {"PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg", "COLUMNS": "200"}
        if self._shim:
            environment["LD_PRELOAD"] = str(self._shim)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.hostile.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self._directory,
            env=environment,
            user=self._user,
        )
        assert self._line(START_S), "the driver did not start"
        return self._process

    def _line(self, timeout_s: float) -> str | None:
        """Return the next line, None if it takes too long, '' if the process has ended."""
        assert self._process
        assert self._process.stdout
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        return self._process.stdout.readline() if ready else None
