"""The sampling kernel draws the tokens of the definition.

On a GPU the kernel is compiled. Elsewhere it runs in Triton's interpreter, which must be switched
on before Triton is imported: `test_kernel` runs this file so.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from engines.inference.sampling import gpu
from engines.inference.sampling.step_rows import StepRows
from tests.inference.random_steps import Step, check, make_step

ON_GPU = torch.cuda.is_available()
TILES = [{}] if ON_GPU else [{"rows_at_once": 1024, "block": 64, "requests_at_once": 512}]


def to_gpu(thing: Any) -> Any:
    return thing.cuda() if ON_GPU and isinstance(thing, Tensor) else thing


def on_gpu(step: Step) -> tuple[Tensor, Tensor, StepRows]:
    """Return the arguments of `gpu.sample`, on the GPU if there is one."""
    rows = replace(
        step.rows, **{f.name: to_gpu(getattr(step.rows, f.name)) for f in fields(step.rows)}
    )
    logits = to_gpu(step.logits)
    drawn_from = logits if step.drawn_from is step.logits else to_gpu(step.drawn_from)
    return logits, drawn_from, rows


def sampled(step: Step, **tile: int) -> tuple[Tensor, Tensor]:
    return gpu.sample(*on_gpu(step), **tile)


@pytest.mark.parametrize("tile", TILES)
def test_every_token_of_100_000_rows(tile):
    from engines.inference.sampling import cpu

    step = make_step(1, 100_000, 36)
    check(step, *cpu.sample(step.logits, step.drawn_from, step.rows))
    check(step, *sampled(step, **tile))


@pytest.mark.parametrize(
    "changes",
    [{}, {"drafted": False}, {"truncated": True}, {"greedy_only": True}, {"dtype": torch.bfloat16}],
    ids=str,
)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(64, 1000), (1, 50), (17, 1)])
def test_kernel_draws_every_token_in_any_step(num_rows, vocab_size, changes):
    step = make_step(num_rows, num_rows, vocab_size, **changes)
    for tile in (
        {"rows_at_once": 4, "block": 256},
        {"rows_at_once": 64, "block": 64, "requests_at_once": 8},
    ):
        check(step, *sampled(step, **tile))


def test_a_vocabulary_of_many_parts():
    """The kernel splits a large vocabulary into parts and combines their results."""
    step = make_step(5, 2, 151_936)
    check(step, *sampled(step))


def test_another_noise_would_be_noticed():
    """Negative control: with other keys, the comparison fails."""
    step = make_step(0, 64, 36)
    step.rows.keys.add_(1)
    with pytest.raises(AssertionError):
        check(step, *sampled(step, **TILES[0]))


@pytest.mark.parametrize(
    ("most_drafts", "widths"), [(0, {1}), (4, {1, 2, 4, 8}), (15, {1, 2, 4, 8, 16})]
)
def test_warmup_compiles_the_kernels_of_steps(monkeypatch, most_drafts, widths):
    """Kernels are compiled for the next power of two of the rows per request."""
    warmed = []

    def seen(logits, drawn_from, rows):
        warmed.append(triton.next_power_of_2(rows.width))
        return sample(logits, drawn_from, rows, block=64)

    sample = gpu.sample
    monkeypatch.setattr(gpu, "sample", seen)
    gpu.warm(100, torch.bfloat16, torch.device("cuda" if ON_GPU else "cpu"), most_drafts)
    steps = {triton.next_power_of_2(width) for width in range(1, most_drafts + 2)}
    assert set(warmed) == steps == widths
