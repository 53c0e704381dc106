"""A stand-in for a GPU, in every process of a run whose PYTHONPATH has this folder: it is there,
weights can stay on it, and no file of weights is read."""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def _it_is_there(module: Any) -> None:
    module.require_gpus = lambda: 1


def _work_on_it(_: Any) -> None:
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.stand_in_ipc import stand_in

    stand_in(os.environ["CUDA_VISIBLE_DEVICES"])


def _read_no_file(module: Any) -> None:
    def load(_: Any, path: str) -> None:
        raise RuntimeError(f"{path} was to be read")

    module.PolicyWeightTransfer._load = load


CHANGES: dict[str, Callable[[Any], None]] = {
    "tasks.run.machine": _it_is_there,
    "vllm.distributed.weight_transfer.packed_tensor": _work_on_it,
    "engines.inference.weights.transfer": _read_no_file,
}


class Changing(importlib.abc.MetaPathFinder):
    """Changes modules when they have been loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGES:
            return None
        change = CHANGES.pop(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec
        assert spec.loader
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # ty: ignore[invalid-assignment]
        return spec


sys.meta_path.insert(0, Changing())
