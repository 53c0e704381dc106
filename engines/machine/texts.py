"""Texts of NVIDIA's driver and tools, read. Pure."""

import re
from itertools import combinations

from schemas.machine import GpuSeen

GPU_FIELDS = ("index", "name", "compute_cap", "memory.total", "memory.free")
"""Fields that nvidia-smi is asked for, `--format=csv,noheader,nounits`."""
_MIB = 2**20


def parse_driver(text: str) -> str | None:
    """Version of the kernel module, from /proc/driver/nvidia/version."""
    found = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def parse_gpus(text: str) -> tuple[GpuSeen, ...]:
    """GPUs from nvidia-smi's lines of `GPU_FIELDS`; what it does not know is None."""
    return tuple(_gpu(line) for line in text.splitlines() if line.strip())


def _gpu(line: str) -> GpuSeen:
    index, name, capability, total, free = (field.strip() for field in line.split(","))
    major, dot, minor = capability.partition(".")
    return GpuSeen(
        index=int(index),
        name=name,
        compute_capability=(int(major), int(minor)) if dot else None,
        memory_bytes=int(total) * _MIB if total.isdigit() else None,
        free_bytes=int(free) * _MIB if free.isdigit() else None,
    )


def parse_links(text: str) -> dict[str, str]:
    """Connection of each pair of GPUs, `0-1` -> `NV18`, from `nvidia-smi topo -m`."""
    lines = [line.split() for line in _plain(text).splitlines() if line.strip()]
    rows = {row[0]: row[1:] for row in lines if re.fullmatch(r"GPU\d+", row[0])}
    # The heading begins with GPU0 as well, and comes first.
    header = next((row for row in lines if row[0] == "GPU0"), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    names = [name for name in columns if name in rows]
    return {
        f"{one[3:]}-{other[3:]}": rows[one][columns.index(other)]
        for one, other in combinations(names, 2)
    }


def _plain(text: str) -> str:
    """Text without the escapes by which a terminal underlines."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
