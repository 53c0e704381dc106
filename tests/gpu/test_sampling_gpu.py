"""The sampling kernel on a GPU draws the tokens of the definition and never waits for the host.

The last test measures its time.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.needs import REHEARSAL, lacking, needs
from tests.inference.random_steps import check, make_step

VOCAB_SIZE = 512 if REHEARSAL else 151_936
TIMED_ROWS = (4, 8) if REHEARSAL else (16, 64, 256, 1024, 2304)
REPEATS = 1 if REHEARSAL else 25
AHEAD_CYCLES = 2_000_000
"""Cycles to keep the GPU busy while a step is launched, so that launch time does not count."""
Step = Callable[[], Any]
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@needs("cuda", "triton", seconds=60)
def test_every_token_of_100_000_rows() -> None:
    """The step has many temperatures (0 included), ties, -inf, and right and wrong drafts."""
    from tests.inference.kernel_cases import TILES, sampled

    step = make_step(1, 100_000, 36)
    check(step, *sampled(step, **TILES[0]))


@needs("cuda", "triton", seconds=60)
@pytest.mark.parametrize(
    "changes",
    [{}, {"drafted": False}, {"truncated": True}, {"greedy_only": True}, {"dtype": torch.bfloat16}],
    ids=["drafted", "plain", "truncated", "greedy", "bf16"],
)
def test_every_token_of_a_whole_vocabulary(changes: dict) -> None:
    from tests.inference.kernel_cases import sampled

    step = make_step(2, 4 if REHEARSAL else 64, VOCAB_SIZE, **changes)
    check(step, *sampled(step))


@needs("cuda", "triton", seconds=20)
def test_another_noise_is_noticed() -> None:
    """Negative control: with other keys, the comparison fails."""
    from tests.inference.kernel_cases import TILES, sampled

    step = make_step(3, 64, 36)
    step.rows.keys.add_(1)
    with pytest.raises(AssertionError):
        check(step, *sampled(step, **TILES[0]))


@needs("cuda", "triton", seconds=20, rehearsed=False)
@pytest.mark.parametrize("drafted", [False, True])
def test_no_step_waits_for_the_host(drafted: bool) -> None:
    from refrain.engines.inference.sampling import gpu
    from tests.inference.kernel_cases import on_gpu

    logits, _, rows = on_gpu(make_step(4, 64, 1000, drafted=drafted))
    gpu.sample(logits, logits, rows)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, _ = gpu.sample(logits, logits, rows)
        with pytest.raises(RuntimeError, match="synchroniz"):
            tokens.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs("cuda", "triton", seconds=60)
@DTYPES
@pytest.mark.parametrize("num_rows", TIMED_ROWS)
def test_time_beside_eager_and_vllms(
    num_rows: int, dtype: torch.dtype, device: str, figures: Callable
) -> None:
    """Record medians of samplers that take turns, and the bytes per logit of the kernel.

    The bytes are counted from its loads and stores, and estimated from its time at copy speed.
    """
    logits = torch.randn(num_rows, VOCAB_SIZE, device=device).to(dtype)
    steps = {"kernel": _kernel(logits), "eager": _eager(logits), **_vllm(logits)}
    seconds = _medians(steps, device)
    name = f"sampling_{'bf16' if dtype == torch.bfloat16 else 'fp32'}_{num_rows}_rows"
    figures(**{f"{name}_{of}_us": s * 1e6 for of, s in seconds.items()})
    copied = seconds["kernel"] * _copy_bytes_per_s(device) / logits.numel()
    figures(**{f"{name}_bytes_per_logit": _bytes_per_logit(logits)})
    figures(**{f"{name}_bytes_per_logit_at_copy_speed": copied})
    if not REHEARSAL and num_rows >= 256:
        assert seconds["kernel"] < min(s for of, s in seconds.items() if of != "kernel")


def _kernel(logits: torch.Tensor) -> Step:
    from refrain.engines.inference.sampling import gpu
    from refrain.engines.inference.sampling.step_rows import StepRows

    each = torch.arange(len(logits), device=logits.device)
    temperatures = torch.ones(len(logits), device=logits.device)
    rows = StepRows(each, each.int() + 1, 1, each, temperatures)
    return lambda: gpu.sample(logits, logits, rows)


def _eager(logits: torch.Tensor) -> Step:
    """Return a sampler in plain torch: softmax over exponential noise, with log-probabilities."""
    temperatures = torch.ones(len(logits), 1, device=logits.device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits.float()
        logprobs = wide.log_softmax(-1)
        probabilities = wide.div_(temperatures).softmax(-1)
        noise = torch.empty_like(probabilities).exponential_()
        tokens = probabilities.div_(noise).argmax(-1, keepdim=True)
        return tokens, logprobs.gather(-1, tokens)

    return step


def _vllm(logits: torch.Tensor) -> dict[str, Step]:
    """Return vLLM's own sampler, if vLLM is installed. It may overwrite its inputs."""
    if lacking(("cuda", "vllm")):
        return {}
    from vllm.v1.sample.sampler import Sampler

    from refrain.benchmarks.sampling import _metadata

    sampler, metadata = Sampler(), _metadata(len(logits), logits.device.type)
    return {"vllm": lambda: sampler(logits, metadata)}


def _medians(steps: dict[str, Step], device: str) -> dict[str, float]:
    """Return the median seconds of each step. The first two laps are a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for lap in range(REPEATS + 2):
        for name, step in steps.items():
            seconds = _on_card(step) if device == "cuda" else _on_cpu(step)
            times[name] += [seconds] if lap > 1 else []
    return {name: statistics.median(laps) for name, laps in times.items()}


def _on_card(step: Step) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _on_cpu(step: Step) -> float:
    started_s = time.perf_counter()
    step()
    return time.perf_counter() - started_s


def _bytes_per_logit(logits: torch.Tensor) -> float:
    """Return the bytes per logit: each logit once, and four floats and a token per part.

    Values of a part are written and read.
    """
    from refrain.engines.inference.sampling.gpu import BLOCK

    num_parts = -(-logits.shape[1] // BLOCK)
    return logits.element_size() + 2 * 20 * num_parts / logits.shape[1]


def _copy_bytes_per_s(device: str) -> float:
    """Return the bytes that a copy reads and writes per second."""
    source = torch.empty(2**20 if REHEARSAL else 2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = {"copy": lambda: target.copy_(source)}
    return 2 * source.numel() / _medians(copy, device)["copy"]
