"""A user's own scorer, loaded from a Python file as it is.

The file defines `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, plain or
`async`, with more arguments if `reward.kwargs` gives them; it returns a number or a dict with
`score`.
"""

import hashlib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Given by keyword, as veRL does."""


class RefusedError(ValueError):
    """Fault of a user's scorer; the cause, if any, is an exception of its own code."""


def load_function(path: Path, name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """The function `name` of the file.

    Raises ValueError, with its cause, when the file is missing or cannot be imported, and when
    the function is missing, is not callable or cannot take its arguments.
    """
    module = _import_file(path)
    if not hasattr(module, name):
        functions = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        found = f"it has {', '.join(functions)}" if functions else "it has no functions"
        raise RefusedError(f"{path} has no function {name!r} ({found}): set reward.function")
    function = getattr(module, name)
    if not callable(function):
        raise RefusedError(f"{name!r} in {path} is a {type(function).__name__}, not a function")
    _check_arguments(function, path, name, kwargs)
    return function


def checked_score(result: Any) -> tuple[float, dict[str, Any]]:
    """The score and whatever came with it, as JSON can hold it.

    Raises ValueError for anything but a finite number or a dict whose `score` is one.
    """
    extra: dict[str, Any] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RefusedError(f"the scorer returned a dict without 'score': {_shown(result)}")
        score = result["score"]
        extra = {str(name): value for name, value in result.items() if name != "score"}
    if not isinstance(score, SupportsFloat) or not math.isfinite(float(score)):
        raise RefusedError(f"the scorer returned {_shown(score)}, not a finite number")
    return float(score), json.loads(json.dumps(extra, default=str))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise RefusedError(f"reward.path {path} does not exist")
    # Under a name of its own, or a file called `math.py` would hide a module.
    private = f"_refrain_reward_{hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None or spec.loader is None:
        raise RefusedError(f"reward.path {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[private]
        raise RefusedError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _check_arguments(
    function: Callable[..., Any], path: Path, name: str, kwargs: Mapping[str, Any]
) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except TypeError as error:
        wanted = ", ".join((*ARGUMENTS, *kwargs))
        raise RefusedError(
            f"{name}{signature} in {path} cannot be called with {wanted}: {error}"
        ) from None


def _shown(value: Any) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})"
