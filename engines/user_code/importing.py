"""Import a user's file in a worker process, and explain what its code raises.

Workers import this module and their own. They run under any Python from 3.9 on
(`environment.python`), so all that they import uses the standard library of 3.9.
"""

from __future__ import annotations

import hashlib
import importlib.util
import resource
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

MAX_MESSAGE_CHARACTERS = MAX_TRACEBACK_CHARACTERS = 4000
MEMORY_SETTING: list[str] = []
"""Setting that limits the memory of this process, once `prepare_process` has run."""


class UserFault(ValueError):
    """Fault of a user's file. `__cause__` is the exception of the user's code, if any."""


def prepare_process(
    path: Path, search_path: Sequence[str], max_memory_bytes: int | None, setting: str
) -> None:
    """Set the import path and the memory limit of this process, and of those that it starts.

    `path`: the user's file. `setting`: the one that limits the memory.
    """
    MEMORY_SETTING[:] = [setting]
    sys.path[:] = ordered_path(path.absolute().parent, [*sys.path, *search_path])
    if max_memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = max_memory_bytes if hard == resource.RLIM_INFINITY else min(max_memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def die_first() -> None:
    """If memory runs out, let Linux kill this process rather than the run."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def ordered_path(directory: Path, entries: Sequence[str]) -> list[str]:
    """Return the import path: standard library, directory of the user's file, other entries,
    refrain. So the user's files hide no standard module, and refrain's hide none of the user's."""
    standard_library = sysconfig.get_path("stdlib")
    refrain = str(Path(__file__).resolve().parents[2])
    ranks = {standard_library: 0, f"{standard_library}/lib-dynload": 0, str(directory): 1}
    distinct = dict.fromkeys(filter(None, [str(directory), *entries]))
    return sorted(distinct, key=lambda entry: ranks.get(entry, 3 if entry == refrain else 2))


def import_file(path: Path, setting: str, if_missing: str = "") -> ModuleType:
    """Import the file that `setting` names. Raises UserFault if it does not exist, raises or ends
    the process. `if_missing`: advice about a package that the file imports and nobody has
    installed."""
    if not path.is_file():
        raise UserFault(f"{setting} {path} does not exist")
    # A unique module name: otherwise a file called `math.py` would hide a standard module.
    digest = hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    private = f"_refrain_user_{digest}"
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None or spec.loader is None:
        raise UserFault(f"{setting} {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    # Leave no `__pycache__` beside the user's file.
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except SystemExit as end:
        raise UserFault(f"{path} ends the process that imports it: {end}") from None
    except Exception as error:
        advice = if_missing if isinstance(error, ModuleNotFoundError) else ""
        raise UserFault(f"{path} cannot be imported: {message_of(error)}{advice}") from error
    return module


def explained(error: BaseException) -> str:
    """Return the error's message, with the traceback if the user's code raised it."""
    raised = error.__cause__ if isinstance(error, UserFault) else error
    message = str(error) if isinstance(error, UserFault) else message_of(error)
    if raised is not None:
        # The three arguments are those of Python 3.9.
        users = _users_frames(raised.__traceback__)
        lines = "".join(traceback.format_exception(type(raised), raised, users))
        message = f"{message}\n{lines[-MAX_TRACEBACK_CHARACTERS:]}"
    return as_text(message)


def message_of(error: BaseException) -> str:
    """Return type and message of an exception, and the memory limit that caused it."""
    try:
        text = str(error)
    except Exception as second:
        text = f"its message cannot be read ({type(second).__name__})"
    return f"{type(error).__name__}: {text[:MAX_MESSAGE_CHARACTERS]}{_limit_of(error)}"


def as_text(text: str) -> str:
    """Return a text that can be encoded, with lone surrogates as escapes."""
    return text.encode(errors="backslashreplace").decode()


def shown(value: Any) -> str:
    """Return the beginning of a value's text and its type, for an error."""
    try:
        text = str(value)
    except Exception:
        return type(value).__name__
    return as_text(f"{text[:80]!r} ({type(value).__name__})")


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames after the last one of refrain, or all if there are none."""
    rooms = Path(__file__).parents[1]
    users, here = frames, frames
    while here is not None:
        if rooms in Path(here.tb_frame.f_code.co_filename).parents:
            users = here.tb_next or users
        here = here.tb_next
    return users


def _limit_of(error: BaseException) -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not isinstance(error, MemoryError) or most == resource.RLIM_INFINITY:
        return ""
    return f" ({''.join(MEMORY_SETTING)} is {most})"
