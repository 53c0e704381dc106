"""Load a user's file in a worker process, and explain what its code raises.

Workers run under any Python from 3.9 on (`environment.python`), so this module and all that a
worker imports use the standard library of 3.9.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import resource
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

MAX_MESSAGE_CHARACTERS = MAX_TRACEBACK_CHARACTERS = 4000


class UserFault(ValueError):
    """Fault of a user's file. `__cause__` is the exception of the user's code, if any."""


def limit_memory(max_bytes: int | None) -> None:
    """Limit the memory of this process, and of those that it starts."""
    if max_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def ordered_path(directory: Path, entries: Sequence[str]) -> list[str]:
    """Return the import path: standard library, directory of the user's file, other entries,
    refrain. So the user's files hide no standard module, and refrain's hide none of the user's."""
    standard_library = sysconfig.get_path("stdlib")
    refrain = str(Path(__file__).resolve().parents[2])
    ranks = {standard_library: 0, f"{standard_library}/lib-dynload": 0, str(directory): 1}
    distinct = dict.fromkeys(filter(None, [str(directory), *entries]))
    return sorted(distinct, key=lambda entry: ranks.get(entry, 3 if entry == refrain else 2))


def import_file(path: Path) -> ModuleType:
    """Import a file. Raises UserFault if it is missing, raises or ends the process."""
    if not path.is_file():
        raise UserFault(f"environment.path {path} does not exist")
    # A unique module name: otherwise a file called `math.py` would hide a standard module.
    digest = hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    private = f"_refrain_environment_{digest}"
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None or spec.loader is None:
        raise UserFault(f"environment.path {path} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    # Leave no `__pycache__` beside the user's file.
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except SystemExit as end:
        raise UserFault(f"{path} ends the process that imports it: {end}") from None
    except Exception as error:
        raise UserFault(f"{path} cannot be imported: {message_of(error)}") from error
    return module


def found_environment(module: ModuleType, path: Path, name: str | None) -> Any:
    """Return the class, the function `run` or the list of tools. Without a name: the only class
    with `step` or `run`, or the function `run`; else the list `tools`; else the only class with
    `tools`. Raises UserFault that names the choices."""
    if name is not None:
        return _named(module, path, name)
    own = [one for one in vars(module).values() if _is_own_class(one, module)]
    answering = [one for one in own if hasattr(one, "step") or is_agent(one)]
    answering += [one for one in [getattr(module, "run", None)] if is_agent(one)]
    found = answering or _listed(module) or [one for one in own if hasattr(one, "tools")]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(one.__name__ for one in found)
        raise UserFault(f"{path} has several environments ({names}): set environment.name")
    raise UserFault(
        f"{path} has no environment: write a class with `step`, a list `tools` of functions, or "
        "`async def run(task, model)`"
    )


def is_agent(value: Any) -> bool:
    """Return whether a value is `run(task, model)`, or a class with it and without `step`. A tool
    may be called `run`, too."""
    run = getattr(value, "run", None) if inspect.isclass(value) else value
    if hasattr(value, "step") or not inspect.isfunction(run):
        return False
    names = list(inspect.signature(run).parameters)
    return names[-2:] == ["task", "model"] and len(names) == 2 + inspect.isclass(value)


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


def _named(module: ModuleType, path: Path, name: str) -> Any:
    if not hasattr(module, name):
        names = [n for n, one in vars(module).items() if _is_own_class(one, module)]
        has = f"it has {', '.join(names)}" if names else "it has no classes"
        raise UserFault(f"{path} has no {name!r} ({has}): correct environment.name")
    found = getattr(module, name)
    if not inspect.isclass(found) and not isinstance(found, (list, tuple)) and not is_agent(found):
        kind = type(found).__name__
        raise UserFault(f"{name!r} in {path} is a {kind}: name a class or a list of functions")
    return found


def _is_own_class(value: Any, module: ModuleType) -> bool:
    return inspect.isclass(value) and value.__module__ == module.__name__


def _listed(module: ModuleType) -> list[Any]:
    tools = getattr(module, "tools", None)
    return [tools] if isinstance(tools, (list, tuple)) else []


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames after the last one of refrain, or all if there are none."""
    users, here = frames, frames
    while here is not None:
        if Path(here.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
            users = here.tb_next or users
        here = here.tb_next
    return users


def _limit_of(error: BaseException) -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if not isinstance(error, MemoryError) or most == resource.RLIM_INFINITY:
        return ""
    return f" (environment.max_memory_bytes is {most})"
