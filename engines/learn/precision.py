"""Let a policy compute in another data type for a while, without a copy of its parameters."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map


class ComputeIn(TorchFunctionMode):
    """Make every operation on a parameter compute in `dtype`.

    The operation gets casts of the parameter and of its other floating-point arguments, so its
    result has `dtype` too. In bfloat16, a float32 policy returns what its bfloat16 copy returns,
    bit for bit. In float32, a bfloat16 policy no longer rounds. At most one parameter is cast at a
    time; the model is never copied.

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
            # The result is a few rows of the table: cast these rows, not the table.
            return self._cast(func(*args, **named))
        return func(*tree_map(self._cast, args), **tree_map(self._cast, named))

    def _cast(self, value: Any) -> Any:
        is_real = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self._dtype) if is_real else value


def _is_parameter(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and value.is_floating_point()


def _is_attribute(func: Callable[..., Any]) -> bool:
    """Return whether the function reads or sets an attribute, for example `tensor.data`. Attributes
    must be those of the parameter, not of a cast copy."""
    return getattr(func, "__name__", "") in ("__get__", "__set__")
