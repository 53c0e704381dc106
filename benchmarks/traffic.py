"""Bytes and launches of a step of the sampler: counted, not timed, without a GPU.

A dispatch mode counts torch's operations on meta tensors, which have shapes and no data. An
operation that needs data, to choose a shape or to send something to the host, fails on them.
Kernels are counted where they are launched. Their bytes are their own loads and stores in Triton's
interpreter, which needs a process of its own (`python -m benchmarks.traffic`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engines.inference.sampling import gpu
from engines.inference.sampling.noise import perturbed_argmax
from engines.inference.sampling.step_rows import StepRows

KERNELS = ("draw", "accept")
_NUM_INTERPRETED = 2
"""Rows to interpret. All rows move the same bytes."""
_TIMEOUT_S = 600.0
_MOVING = (
    *("load", "store", "ptr", "splat", "broadcast", "expand", "reshape", "trans", "bitcast"),
    *(
        "range",
        "program",
        "barrier",
        "assert",
        "print",
        "tensor_descriptor",
        "descriptor",
        "atomic",
    ),
    *("dot", "histogram", "cat", "join", "split", "gather", "extern", "elementwise"),
)
"""Parts of the names of the interpreter's operations that compute nothing."""
_RESERVING = ("aten::empty", "aten::new_empty")


class Traffic(TorchDispatchMode):
    """Count torch's operations while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []
        self.num_bytes = 0
        """Bytes read and written by torch's operations."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if not (func.is_view or name.startswith(_RESERVING)):
            self.launches.append(name)
            self.num_bytes += _num_bytes([*args, *kwargs.values(), out])
        return out


def _num_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(_num_bytes, value)) if isinstance(value, list | tuple) else 0


class _Noted:
    """Stand-in for a kernel, which notes launches."""

    def __init__(self, name: str, launches: list[str]) -> None:
        self._note = lambda *_, **__: launches.append(name)

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._note


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count operations and launches. Kernels are noted and do not run."""
    traffic = Traffic()
    with ExitStack() as stack:
        for name in KERNELS:
            stack.enter_context(patch.object(gpu, name, _Noted(name, traffic.launches)))
        stack.enter_context(traffic)
        yield traffic


def runner_of(num_requests: int, num_tokens: int, device: str) -> Any:
    """Return a stand-in for vLLM's runner with all that samplers read."""
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args={"sample_key": 1}))
    ids = [str(i) for i in range(num_requests)]
    return SimpleNamespace(
        device=device,
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        input_ids=SimpleNamespace(gpu=torch.zeros(num_tokens, dtype=torch.int32, device=device)),
        query_start_loc=SimpleNamespace(
            gpu=torch.arange(num_requests + 1, dtype=torch.int32, device=device)
        ),
        input_batch=SimpleNamespace(req_ids=ids, num_reqs=num_requests),
        requests=dict.fromkeys(ids, request),
    )


def count_eager(num_rows: int, vocab_size: int) -> Traffic:
    """Count the same step with torch's operations alone, as the noise is defined."""
    keys = torch.zeros(num_rows, dtype=torch.int64, device="meta")
    logits = torch.zeros(num_rows, vocab_size, device="meta")
    temperatures = torch.ones(num_rows, 1, device="meta")
    with Traffic() as traffic:
        scaled = logits / temperatures
        tokens = perturbed_argmax(scaled, keys, keys)
        scaled.gather(-1, tokens[:, None]).squeeze(-1) - scaled.logsumexp(dim=-1)
    return traffic


def kernel_counts_per_row(vocab_size: int) -> tuple[float, float]:
    """Return the bytes that the kernels load and store for each row, and their operations.

    An operation is a number that arithmetic, a comparison, a conversion or a selection makes.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.traffic", str(vocab_size)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    if done.returncode:
        raise RuntimeError(f"the kernel failed in Triton's interpreter:\n{done.stderr[-2000:]}")
    num_bytes, num_operations = json.loads(done.stdout)
    return num_bytes, num_operations


def _interpreted_counts(vocab_size: int) -> tuple[float, float]:
    from triton.runtime.interpreter import InterpreterBuilder, interpreter_builder

    num_bytes = num_operations = 0

    def counting(name: str, masked: int) -> Any:
        """`masked`: index of the argument that masks what is moved."""
        original = getattr(InterpreterBuilder, name)

        def count(builder: Any, pointers: Any, *args: Any) -> Any:
            nonlocal num_bytes
            moved = np.count_nonzero(args[masked].data) if args else pointers.data.size
            num_bytes += int(moved) * (pointers.get_element_ty().primitive_bitwidth // 8)
            return original(builder, pointers, *args)

        return patch.object(InterpreterBuilder, name, count)

    def operating(name: str) -> Any:
        original = getattr(InterpreterBuilder, name)

        def count(builder: Any, *args: Any) -> Any:
            nonlocal num_operations
            made = original(builder, *args)
            num_operations += made.data.size
            return made

        return patch.object(InterpreterBuilder, name, count)

    # Otherwise the interpreter checks each integer operation for overflow by further ones.
    object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)
    operations = [
        name
        for name in dir(InterpreterBuilder)
        if name.startswith("create_") and not any(part in name for part in _MOVING)
    ]
    ends = torch.arange(1, _NUM_INTERPRETED + 1, dtype=torch.int32)
    rows = StepRows(
        positions=torch.zeros(_NUM_INTERPRETED, dtype=torch.int64),
        input_rows=ends,
        after=1,
        keys=torch.zeros(_NUM_INTERPRETED, dtype=torch.int64),
        temperatures=torch.ones(_NUM_INTERPRETED),
    )
    random = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(_NUM_INTERPRETED, vocab_size, generator=random)
    with ExitStack() as stack:
        stack.enter_context(counting("create_masked_load", 0))
        stack.enter_context(counting("create_masked_store", 1))
        for name in operations:
            stack.enter_context(operating(name))
        gpu.sample(logits, logits, rows)
    return num_bytes / _NUM_INTERPRETED, num_operations / _NUM_INTERPRETED


if __name__ == "__main__":
    print(json.dumps(_interpreted_counts(int(sys.argv[1]))))
