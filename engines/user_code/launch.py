"""Start a worker process under the guard, end it, and name how it ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from refrain.engines.user_code import guard

END_TIMEOUT_S = 2 * guard.CLEAR_S
"""Time limit for ending the process and all that it started."""

GUARD = (sys.executable, "-I", "-S", guard.__file__)

LOCALE = ("LANG", "LANGUAGE", "LC_*", "TZ")
"""Environment variables of language and time zone, as patterns."""
PASSED_ON = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", *LOCALE, "TMPDIR", "PYTHON*", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "XDG_*", "*_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "DO_NOT_TRACK", "REFRAIN_RUN_DIR",
)  # fmt: skip
"""Environment variables that all user code gets, as patterns. None of them holds a secret."""

START = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import types
from importlib import import_module
_, engines, room, descriptor = sys.argv
for name, path in (("_refrain", engines), ("_refrain." + room, engines + "/" + room)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
main = import_module("_refrain." + room + ".worker").main
main(int(descriptor))
"""
"""Script that starts a worker. Workers import refrain's modules under another name, because the
user may have modules called as refrain's. They never run a room's `__init__`."""

SIGNALS = {int(one): one.name for one in signal.Signals}


def worker_command(python: str, room: str, descriptor: int) -> list[str]:
    """Return the command of the worker in a room of `engines`, which talks over this descriptor."""
    engines = str(Path(__file__).resolve().parents[1])
    return [python, "-c", START, engines, room, str(descriptor)]


def start_guarded(
    command: Sequence[str], descriptor: int, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command under the guard, with one descriptor and these environment variables."""
    return subprocess.Popen(
        [*GUARD, str(descriptor), *command],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        env=dict(variables),
        start_new_session=True,
    )


def end_guarded(process: subprocess.Popen[bytes], group: int | None) -> None:
    """Wait for a guard whose socket is closed, or kill it. `group`: its command's process group."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_TIMEOUT_S)
    if process.poll() is None:
        process.kill()
    if process.wait() < 0 and group is not None:
        # The guard itself was killed. The worker died with it, but its children may live.
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def how_it_ended(process: subprocess.Popen[bytes], code_of: str) -> str:
    """Return how a process ended that closed its socket. `code_of`: who may end it, such as `the
    scorer`."""
    try:
        code = process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "its process closed refrain's socket"
    name = SIGNALS.get(code - guard.SIGNALLED if code > guard.SIGNALLED else -code)
    if name is None:
        return f"{code_of} ended its process (exit code {code})"
    memory = ", as Linux does when memory is short" * (name == signal.SIGKILL.name)
    return f"its process was ended by {name}{memory}"


def variables_for(
    named: Sequence[str], surroundings: Mapping[str, str] | None, setting: str
) -> dict[str, str]:
    """Return the environment variables of user code: those of `PASSED_ON` and those named.

    `surroundings`: the run's `LOCALE` variables, used instead of this machine's. `setting`: the
    setting that names variables. Raises ValueError when a named variable is not set.
    """
    variables = passed_on(os.environ, named, setting)
    if surroundings is None:
        return variables
    own = locale_of(variables).keys() - set(named)
    return {**surroundings, **{name: text for name, text in variables.items() if name not in own}}


def passed_on(environment: Mapping[str, str], named: Sequence[str], setting: str) -> dict[str, str]:
    """Return the variables of `PASSED_ON` and those named in a setting.

    Raises ValueError when a named variable is not set.
    """
    for name in named:
        if name not in environment:
            raise ValueError(
                f"{setting} names {name}, which is not set where your code runs. Export it before "
                "the run (on a cluster: before Ray starts), or remove it from the list."
            )
    return {
        name: value
        for name, value in environment.items()
        if name in named or any(fnmatchcase(name, pattern) for pattern in PASSED_ON)
    }


def locale_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `LOCALE`."""
    return {
        name: value
        for name, value in environment.items()
        if any(fnmatchcase(name, pattern) for pattern in LOCALE)
    }
