"""Parse the output of NVIDIA's driver and tools. Pure."""

import re
from itertools import combinations

from refrain.schemas.machine import GpuInfo

GPU_FIELDS = ("index", "name", "compute_cap", "memory.total", "memory.free")
"""Fields of the query to nvidia-smi, with `--format=csv,noheader,nounits`."""
_MIB = 2**20


def parse_driver(text: str) -> str | None:
    """Return the kernel module's version from the text of /proc/driver/nvidia/version."""
    found = re.search(r"NVRM version:.*?\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def parse_gpus(text: str) -> tuple[GpuInfo, ...]:
    """Return the GPUs from nvidia-smi's lines of `GPU_FIELDS`. Unknown values are None."""
    return tuple(_gpu(line) for line in text.splitlines() if line.strip())


def _gpu(line: str) -> GpuInfo:
    index, name, capability, total, free = (field.strip() for field in line.split(","))
    major, dot, minor = capability.partition(".")
    return GpuInfo(
        index=int(index),
        name=name,
        compute_capability=(int(major), int(minor)) if dot else None,
        memory_bytes=int(total) * _MIB if total.isdigit() else None,
        free_bytes=int(free) * _MIB if free.isdigit() else None,
    )


def parse_links(text: str) -> dict[str, str]:
    """Return the link of each pair of GPUs from the output of `nvidia-smi topo -m`.

    For example, `{"0-1": "NV18"}`.
    """
    lines = [line.split() for line in _plain(text).splitlines() if line.strip()]
    rows = {row[0]: row[1:] for row in lines if re.fullmatch(r"GPU\d+", row[0])}
    # The header starts with GPU0 like the first row, but comes before it.
    header = next((row for row in lines if row[0] == "GPU0"), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    names = [name for name in columns if name in rows]
    return {
        f"{one[3:]}-{other[3:]}": rows[one][columns.index(other)]
        for one, other in combinations(names, 2)
    }


def _plain(text: str) -> str:
    """Return the text without the terminal's escape sequences, which underline the header."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
