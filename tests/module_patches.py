"""An import hook that changes modules once they are loaded, for the processes of a run."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class Changing(importlib.abc.MetaPathFinder):
    """`changes`: a function for each module's name, called once with the loaded module."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._changes:
            return None
        change = self._changes.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec
        assert spec.loader
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # ty: ignore[invalid-assignment]
        return spec


def change_when_loaded(changes: dict[str, Callable[[Any], None]]) -> None:
    sys.meta_path.insert(0, Changing(changes))
