"""Count torch's operations without a device: their launches and bytes.

A dispatch mode counts operations on meta or fake tensors, which have shapes and no data. An
operation that needs data, to choose a shape or to send something to the host, fails on them.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NO_LAUNCH = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "prim::")


class Traffic(TorchDispatchMode):
    """Count torch's operations while it is entered and not paused."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.num_bytes = 0
        """Bytes read and written by torch's operations."""
        self.paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let `torch.compile` compile while this mode is entered."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if not (self.paused or func.is_view or name.startswith(_NO_LAUNCH)):
            self.launches.append(name)
            written = out if func._schema.returns else _written(func, args)
            self.num_bytes += bytes_of([*args, *kwargs.values(), written])
        return out


def bytes_of(value: Any) -> int:
    """Return the bytes of all tensors in a value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


def _written(func: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the arguments that an operation without a result changes."""
    marks = (argument.alias_info for argument in func._schema.arguments)
    return [arg for arg, mark in zip(args, marks, strict=False) if mark and mark.is_write]
