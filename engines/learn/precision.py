"""A policy that computes in another data type for a while, with the parameters that it has."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class ComputeIn(TorchFunctionMode):
    """Make every operation on a parameter compute in `dtype`.

    The parameter and the other floating-point arguments are cast for that operation alone, so what
    follows from its result has the data type too. In bfloat16 a float32 policy gives what its
    bfloat16 copy gives, bit for bit; in float32 a bfloat16 policy rounds nothing any more. No copy
    of the model is made: at most one parameter is cast at a time.

    Example: `with ComputeIn(torch.bfloat16): policy.score(batch, 1.0)`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        named = dict(kwargs or {})
        if _is_attribute(func) or not any(map(_is_parameter, [*args, *named.values()])):
            return func(*args, **named)
        if func is F.embedding:
            # Its result is a few rows of the table: cast those, not the table.
            return self._cast(func(*args, **named))
        return func(*tree_map(self._cast, args), **tree_map(self._cast, named))

    def _cast(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_real else value


def _is_parameter(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.is_floating_point()


def _is_attribute(func: Callable[..., Any]) -> bool:
    """Whether it reads or sets `tensor.data`, `tensor.dtype` and the like: of what is there, not of
    a cast copy."""
    return getattr(func, "__name__", "") in ("__get__", "__set__")
