"""Whether a process works on GPUs: never by chance on a CPU where GPUs were meant.

torch says of a driver that is too old for it, or broken, only that there is no CUDA. So where it is
built for CUDA, or Ray has given the process GPUs that are really there, no GPU is an error.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from engines.machine import cuda_probe
from engines.machine.asking import Unanswered, ask
from engines.machine.texts import parse_driver
from engines.machine.verdicts import why_no_gpu
from schemas.machine import CudaSeen

PROBE_TIMEOUT_S = 20.0
"""Longest time for a driver that is loaded anew for the first process to ask."""
_DRIVER = Path("/proc/driver/nvidia/version")


def torch_build() -> str | None:
    """CUDA version that the installed torch is made for, without importing it; None: it is for
    CPUs, or there is none."""
    found = importlib.util.find_spec("torch")
    for directory in (found.submodule_search_locations or ()) if found else ():
        spec = importlib.util.spec_from_file_location("_torch_version", f"{directory}/version.py")
        if spec and spec.loader:
            version = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(version)
            return version.cuda
    return None


def device_files() -> list[Path]:
    """Files of NVIDIA's GPUs, which a container has of those that it was given."""
    return list(Path("/dev").glob("nvidia[0-9]*"))


def see_cuda() -> CudaSeen:
    """GPUs as CUDA has them here; waits for `PROBE_TIMEOUT_S` at most."""
    seen: dict[str, object] = {
        "driver": parse_driver(_DRIVER.read_text()) if _DRIVER.exists() else None,
        "num_device_files": len(device_files()),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    command = [sys.executable, "-I", "-S", cuda_probe.__file__]
    try:
        seen |= json.loads(ask(command, PROBE_TIMEOUT_S))
    except Unanswered:
        seen |= {"library": True, "answered": False}
    except subprocess.CalledProcessError as error:
        # A driver that brings down whoever asks it.
        seen |= {"library": True, "code": error.returncode}
    return CudaSeen.model_validate(seen)


def require_gpus() -> int:
    """GPUs that CUDA has here; 0 where torch is built for CPUs. Raises ValueError when it is built
    for CUDA and there is none that it can use."""
    build = torch_build()
    if build is None:
        return 0
    seen = see_cuda()
    if why := why_no_gpu(build, seen):
        raise ValueError(str(why))
    return seen.num_gpus


def works_on_cpu() -> bool:
    """Whether this process is to work on a CPU. Raises RuntimeError when it would have to, but was
    meant for GPUs."""
    import torch

    if torch.cuda.is_available():
        return False
    build = torch.version.cuda
    if build is not None:
        raise RuntimeError(str(why_no_gpu(build, see_cuda(), torch_fails=True)))
    given = _gpus_of_ray()
    # Ray believes whoever tells it of GPUs.
    if given and device_files():
        raise RuntimeError(
            f"Ray gave this process the GPUs {', '.join(given)}, but the CPU build of torch "
            f"({torch.__version__}) cannot use any: install the CUDA build by "
            "`make setup VARIANT=gpu`, or set CUDA_VISIBLE_DEVICES= to work on CPUs"
        )
    return True


def _gpus_of_ray() -> list[str]:
    """GPUs that Ray has given to this process, which need not be one of Ray's."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return []
    return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
