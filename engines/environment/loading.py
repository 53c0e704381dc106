"""Find the environment in a user's file. Workers import this module: see
`engines/user_code/importing.py`."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from ..user_code.importing import UserFault


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
