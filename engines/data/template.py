"""Run chat templates and tokenizers in a separate process. They come with a model, and may loop for
ever or fill the memory. Python could not stop a thread that does so."""

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any

CPU_S = 2
LOAD_CPU_S = 10
"""CPU seconds for a prompt, per started million characters; and for loading a tokenizer."""
WALL_S = 30.0
"""Time limit in seconds for one prompt on a busy machine, including the start of the process."""
MORE_CHARACTERS = 2**20
TIMES_CHARACTERS = 8
"""A prompt may have `TIMES_CHARACTERS` times its messages' characters, plus `MORE_CHARACTERS`."""
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
_COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("template_process.py")))
_MAX_ESCAPED = 12
"""Most bytes of one character in JSON."""


class StoppedTemplate(ValueError):
    """A template had to be stopped. The next prompt would fail in the same way."""


class TemplateProcess:
    """Handle to the process. It starts on first use, and again after a template was stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: tuple[Any, str] | None = None
        """Last tokenizer sent to the process, and its key."""

    def try_tokenizer(self, file: Path) -> None:
        """Raise ValueError for a tokenizer.json that cannot be loaded and used."""
        with self._lock:
            self._request("tokenizer", LOAD_CPU_S, file=str(file))

    def tokens(
        self, arguments: Mapping[str, Any], tokenizer: Any, now: datetime | None = None
    ) -> list[int]:
        """Return the tokens of a prompt. `arguments`: those of transformers'
        `render_jinja_template`. `now`: current time for the template; None: the clock's.

        Raises ValueError when the template refuses the arguments, or `StoppedTemplate`.
        """
        if not tokenizer.is_fast or tokenizer.split_special_tokens:
            return tokenizer(self.text(arguments, now), add_special_tokens=False)["input_ids"]
        given = {"arguments": arguments, "now": now and now.isoformat()}
        with self._lock:
            key = self._key(tokenizer)
            return self._request("chat template", CPU_S, key=key, **given)["tokens"]

    def text(self, arguments: Mapping[str, Any], now: datetime | None = None) -> str:
        """Return the text of a conversation. Arguments and errors are those of `tokens`."""
        given = {"arguments": arguments, "now": now and now.isoformat()}
        with self._lock:
            return self._request("chat template", CPU_S, **given)["text"]

    def _key(self, tokenizer: Any) -> str:
        """Return the tokenizer's key. Send the tokenizer to the process if it lacks it."""
        if self._process and self._kept and self._kept[0] is tokenizer:
            return self._kept[1]
        content = tokenizer.backend_tokenizer.to_str()
        key = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
        self._request("tokenizer", LOAD_CPU_S, key=key, tokenizer=content)
        self._kept = (tokenizer, key)
        return key

    def _request(self, what: str, seconds: int, **fields: Any) -> dict[str, Any]:
        """Send a request and return the reply. `what`: name of the part that runs, for errors."""
        given = json.dumps(fields, default=str)
        characters = MORE_CHARACTERS + TIMES_CHARACTERS * len(given)
        seconds *= 1 + len(given) // 10**6
        request = json.dumps({"seconds": seconds, "characters": characters})
        process = self._process or self._start()
        try:
            line = f"{request[:-1]}, {given[1:]}\n".encode()
            answer = json.loads(self._ask(process, line, characters, what, seconds))
        except BaseException:
            self._close()
            raise
        if "stopped" in answer:
            raise StoppedTemplate(f"the {what} {answer['stopped']}")
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

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
            env={**environment, "HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": "1"},
        )
        return self._process

    def _close(self) -> None:
        process, self._process, self._kept = self._process, None, None
        if process is not None:
            process.kill()
            process.communicate()

    def _ask(
        self,
        process: subprocess.Popen[bytes],
        request: bytes,
        characters: int,
        what: str,
        seconds: int,
    ) -> bytes:
        assert process.stdin
        assert process.stdout
        try:
            process.stdin.write(request)
            process.stdin.flush()
            reply = _line(process.stdout, WALL_S, _MAX_ESCAPED * (characters + 100))
        except BrokenPipeError:
            reply = b""
        except TimeoutError as error:
            raise StoppedTemplate(f"the {what} takes over {WALL_S:g} s") from error
        if reply:
            return reply
        code = process.wait(WALL_S)
        if code == -signal.SIGXCPU:
            raise StoppedTemplate(f"the {what} takes over {seconds} s of CPU time")
        raise StoppedTemplate(f"the {what} ended its process (exit code {code})")


def _line(stream: IO[bytes], timeout_s: float, max_bytes: int) -> bytes:
    """Return a line, or nothing at the end of the stream. Raises TimeoutError."""
    deadline, found = time.monotonic() + timeout_s, bytearray()
    while not found.endswith(b"\n"):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select.select([stream], [], [], left_s)[0]:
            raise TimeoutError
        if not (part := os.read(stream.fileno(), 2**20)):
            return b""
        found += part
        if len(found) > max_bytes:
            raise RuntimeError(f"the process of chat templates sends over {max_bytes} bytes")
    return bytes(found)


templates = TemplateProcess()
"""Template process shared by all callers in this process."""
