"""Chat templates, rendered in a process of its own: a model brings its template, which may loop for
ever or fill the memory, and no thread can be stopped in that."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from engines.data import template_process

CPU_S = 2
"""CPU seconds for one prompt."""
WALL_S = 30.0
"""Seconds for one prompt where the machine is busy; the process may have to start in them."""
MORE_CHARACTERS = 2**20
TIMES_CHARACTERS = 8
"""Characters of a prompt, at most: so many times those of its messages, and the former more."""
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
_COMMAND = (sys.executable, "-P", template_process.__file__)
_MAX_ESCAPED = 12
"""Bytes of one character in JSON, at most."""


class StoppedTemplate(ValueError):
    """A template had to be stopped, and would have to be with the next prompt too."""


class TemplateProcess:
    """The process. Started on first use, and again after a template was stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of a prompt; `arguments`: of transformers' `render_jinja_template`.

        Raises ValueError when the template refuses them, and `StoppedTemplate`.
        """
        given = json.dumps(arguments, default=str)
        characters = MORE_CHARACTERS + TIMES_CHARACTERS * len(given)
        request = f'{{"seconds": {CPU_S}, "characters": {characters}, "arguments": {given}}}\n'
        with self._lock:
            process = self._process or self._start()
            try:
                answer = json.loads(self._ask(process, request.encode(), characters))
            except BaseException:
                self._close()
                raise
        if "stopped" in answer:
            raise StoppedTemplate(f"the chat template {answer['stopped']}")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close()

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._process = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "HF_HUB_OFFLINE": "1"},
        )
        return self._process

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(self, process: subprocess.Popen[bytes], request: bytes, characters: int) -> bytes:
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(request)
            process.stdin.flush()
            reply = _line(process.stdout, WALL_S, _MAX_ESCAPED * (characters + 100))
        except BrokenPipeError:
            reply = b""
        if reply:
            return reply
        code = process.wait(WALL_S)
        if code == -signal.SIGXCPU:
            raise StoppedTemplate(f"the chat template takes over {CPU_S} s of CPU time")
        raise StoppedTemplate(f"the chat template ended its process (exit code {code})")


def _line(stream: IO[bytes], timeout_s: float, max_bytes: int) -> bytes:
    """A line, or nothing where the stream ends. Raises StoppedTemplate."""
    deadline, found = time.monotonic() + timeout_s, bytearray()
    while not found.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
            raise StoppedTemplate(f"the chat template takes over {timeout_s:g} s")
        if not (part := os.read(stream.fileno(), 2**20)):
            return b""
        found += part
        if len(found) > max_bytes:
            raise StoppedTemplate(f"the chat template's process sends over {max_bytes} bytes")
    return bytes(found)


templates = TemplateProcess()
"""The one of this process."""
