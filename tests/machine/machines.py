"""Made-up machines."""

from typing import Any

from refrain.schemas.machine import CudaInfo, GpuInfo, MachineInfo, PackageInfo, PortInfo, Room

GIB = 2**30
READY = CudaInfo(
    library=True,
    cuda_version=(13, 0),
    num_gpus=2,
    driver="580.95.05",
    num_device_files=2,
)
"""Two GPUs that work with CUDA 13."""


def gpu(index: int, **changes: Any) -> GpuInfo:
    seen = GpuInfo(
        index=index,
        name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        memory_bytes=80 * GIB,
        free_bytes=79 * GIB,
    )
    return seen.model_copy(update=changes)


def room(free_bytes: float, num_bytes: float = 1e12) -> Room:
    return Room(path="somewhere", num_bytes=int(num_bytes), free_bytes=int(free_bytes))


def gpu_machine(**changes: Any) -> MachineInfo:
    """Return a machine without faults, then apply the changes."""
    packages = (("torch", "==2.13.0", "2.13.0"), ("vllm", "==0.32.0", "0.32.0"))
    seen = MachineInfo(
        python="3.12.1",
        torch_build="13.0",
        vllm_builds=("vllm",),
        cluster=None,
        cuda=READY,
        gpus=(gpu(0), gpu(1)),
        links={"0-1": "NV18"},
        memory_bytes=int(512e9),
        available_bytes=int(500e9),
        shm=room(256e9, 256e9),
        disks={"disk of runs": room(500e9)},
        ports=(PortInfo(number=4200, service="Prefect", owner=None),),
        open_files=65536,
        packages=tuple(
            PackageInfo(name=name, required=required, installed=installed, fits=True)
            for name, required, installed in packages
        ),
    )
    return seen.model_copy(update=changes)
