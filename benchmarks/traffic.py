"""Bytes and launches of a step of the sampler: counted, not timed, without a GPU.

`benchmarks.operations` counts torch's operations on meta tensors. Kernels are counted where they
are launched. Their bytes and operations are those in Triton's interpreter, which needs a process
of its own (`python -m refrain.benchmarks.traffic`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from refrain.benchmarks.operations import Traffic
from refrain.engines.inference.sampling import gpu, kernels
from refrain.engines.inference.sampling.step_rows import StepRows

KERNELS = ("draw", "accept")
_NUM_RANDOM, _NUM_REAL = 2, 16
"""Rows to interpret."""
_PROMPT = "The lighthouse keeper counted the ships again: 3 + 4 is"
_OF_ARGMAX = 5
"""Operations of an argmax per number: three comparisons, two selections."""
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


@dataclass(frozen=True)
class KernelCounts:
    """What the kernels do for a row of logits."""

    num_bytes: float
    """Loaded and stored."""
    num_operations: float
    """Numbers that arithmetic, comparisons, conversions and selections make, and reductions read.

    Triton repeats operations on one number in each thread. They count once here.
    """
    skipped_share: float
    """Share of the parts of the vocabulary that compute the exact score of one token only."""


def count_kernels(logits: Tensor) -> KernelCounts:
    """Count for the rows of float32 logits [rows, vocab], at temperature 1.

    The kernels do run in Triton's interpreter, so rare branches count as often as they are taken.
    """
    with TemporaryDirectory() as directory:
        torch.save(logits, file := Path(directory) / "logits.pt")
        done = subprocess.run(
            [sys.executable, "-m", "refrain.benchmarks.traffic", str(file)],
            env=os.environ | {"TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    if done.returncode:
        raise RuntimeError(f"the kernel failed in Triton's interpreter:\n{done.stderr[-2000:]}")
    return KernelCounts(**json.loads(done.stdout))


def random_logits(vocab_size: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    return 4.0 * torch.randn(_NUM_RANDOM, vocab_size, generator=random)


def logits_of(model: Path) -> Tensor:
    """Return the logits of a Hugging Face model along a text that it samples at temperature 1."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tokens = tokenizer(_PROMPT, return_tensors="pt").input_ids
    random, rows = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for _ in range(_NUM_REAL):
            rows.append(policy(tokens).logits[0, -1])
            sampled = torch.multinomial(rows[-1].softmax(-1), 1, generator=random)
            tokens = torch.cat([tokens, sampled[None]], dim=1)
    return torch.stack(rows)


class _Interpreted:
    """Counts what Triton's interpreter does while it is entered."""

    def __init__(self) -> None:
        self.num_bytes = self.num_operations = 0
        self.num_scores: list[int] = []
        """Evaluations of the exact noise by each program."""

    def __enter__(self) -> Self:
        from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, interpreter_builder

        # Otherwise the interpreter checks each integer operation for overflow by further ones.
        object.__setattr__(interpreter_builder.options, "sanitize_overflow", False)
        self._patches = ExitStack()
        for name, masked in (("create_masked_load", 0), ("create_masked_store", 1)):
            self._patch(InterpreterBuilder, name, partial(self._move, masked))
        for name in dir(InterpreterBuilder):
            if name.startswith("create_") and not any(part in name for part in _MOVING):
                self._patch(InterpreterBuilder, name, self._operate)
        self._patch(ReduceOps, "apply_impl", self._reduce)
        self._patch(kernels, "_keys", self._begin)
        self._patch(kernels, "_gumbel", self._score)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _patch(self, of: Any, name: str, count: Any) -> None:
        original = getattr(of, name)
        wrapped = lambda *args, **kwargs: count(original, *args, **kwargs)  # noqa: E731
        self._patches.enter_context(patch.object(of, name, wrapped))

    def _move(self, masked: int, original: Any, builder: Any, pointers: Any, *args: Any) -> Any:
        """`masked`: index of the argument that masks what is moved."""
        moved = np.count_nonzero(args[masked].data) if args else pointers.data.size
        self.num_bytes += int(moved) * (pointers.get_element_ty().primitive_bitwidth // 8)
        return original(builder, pointers, *args)

    def _operate(self, original: Any, *args: Any) -> Any:
        made = original(*args)
        self.num_operations += made.data.size
        return made

    def _reduce(self, original: Any, reduction: Any, values: Any) -> Any:
        per_number = 1 if len(values) == 1 else _OF_ARGMAX
        self.num_operations += per_number * values[0].handle.data.size
        return original(reduction, values)

    def _begin(self, original: Any, *args: Any) -> Any:
        self.num_scores.append(0)
        return original(*args)

    def _score(self, original: Any, *args: Any) -> Any:
        self.num_scores[-1] += 1
        return original(*args)


def _interpreted_counts(logits: Tensor) -> KernelCounts:
    num_rows = len(logits)
    rows = StepRows(
        positions=torch.arange(num_rows),
        input_rows=torch.arange(1, num_rows + 1, dtype=torch.int32),
        after=1,
        keys=torch.zeros(num_rows, dtype=torch.int64),
        temperatures=torch.ones(num_rows),
    )
    with _Interpreted() as counted:
        gpu.sample(logits, logits, rows)
    return KernelCounts(
        counted.num_bytes / num_rows,
        counted.num_operations / num_rows,
        float(np.mean(np.array(counted.num_scores) == 1)),
    )


if __name__ == "__main__":
    print(json.dumps(asdict(_interpreted_counts(torch.load(sys.argv[1])))))
