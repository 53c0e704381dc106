"""The user's own advantage and loss, from the Python file that `algorithm.file` names.

They run inside the trainer's processes. Unlike a scorer, they get tensors, and their errors end the
run.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from refrain.engines.user_files import no_bytecode
from refrain.schemas.algorithm import AlgorithmConfig

if TYPE_CHECKING:
    from torch import Tensor

ADVANTAGE, LOSS = "compute_advantage", "compute_loss"
ARGUMENTS = {
    ADVANTAGE: ("reward", "group_rewards"),
    LOSS: ("log_ratios", "advantages", "algorithm"),
}


@dataclass(frozen=True, slots=True)
class OwnFunctions:
    """Functions of a user's file; None for each name that the file does not define."""

    advantage: Callable[..., Any] | None = None
    loss: Callable[..., Any] | None = None

    def advantage_of(self, reward: float, rewards_G: NDArray[np.float64]) -> float:
        """Return the user's `compute_advantage(reward, group_rewards)` for a response. Raise
        ValueError when it is not finite."""
        assert self.advantage is not None
        value = float(self.advantage(reward, rewards_G))
        if not math.isfinite(value):
            raise ValueError(
                f"algorithm.file: {ADVANTAGE}({reward}, {rewards_G.tolist()}) is {value}: return a "
                "finite number"
            )
        return value

    def losses(
        self, log_ratios: "Tensor", advantages: "Tensor", algorithm: AlgorithmConfig
    ) -> "Tensor":
        """Return the user's `compute_loss(log_ratios, advantages, algorithm)`, one loss per token.
        Raise ValueError for a result of another shape."""
        assert self.loss is not None
        losses = self.loss(log_ratios, advantages, algorithm)
        shape = getattr(losses, "shape", None)
        if shape != log_ratios.shape:
            gave = type(losses).__name__ if shape is None else f"the shape {tuple(shape)}"
            raise ValueError(
                f"algorithm.file: {LOSS} returned {gave}, not one loss for each of the "
                f"{len(log_ratios)} tokens: return a tensor of log_ratios' shape"
            )
        return losses


@lru_cache(maxsize=4)
def own_functions(path: Path | None) -> OwnFunctions:
    """Return the functions of the file, or none without a file.

    Raises ValueError when the file is missing, cannot be imported or defines neither function, or
    when a function does not take its arguments.
    """
    if path is None:
        return OwnFunctions()
    module = _import(path)
    found = {name: getattr(module, name, None) for name in ARGUMENTS}
    if not any(found.values()):
        raise ValueError(f"algorithm.file: {path} defines neither {ADVANTAGE} nor {LOSS}")
    for name, function in found.items():
        if function is not None:
            _check_arguments(function, name, ARGUMENTS[name], path)
    return OwnFunctions(found[ADVANTAGE], found[LOSS])


def _import(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("_refrain_algorithm", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(
            f"algorithm.file: there is no Python file {path}: give one that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    try:
        with no_bytecode():
            spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"algorithm.file: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def _check_arguments(
    function: Callable[..., Any], name: str, arguments: Sequence[str], path: Path
) -> None:
    if not callable(function):
        raise ValueError(f"algorithm.file: {name} in {path} is not a function")
    signature = inspect.signature(function)
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"algorithm.file: {name}{signature} in {path} cannot be called with "
            f"{', '.join(arguments)}: {error}"
        ) from None
