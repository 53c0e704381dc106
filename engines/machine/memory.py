"""Measure the host memory that a process may use, including the limits of containers."""

from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 2**60
"""Limits from here on mean no limit: cgroup version 1 writes a 63-bit number for it."""


def host_memory() -> tuple[int, int]:
    """Return the total and the free bytes that this machine or container may use."""
    machine = psutil.virtual_memory()
    limits = list(memory_limits(_MEMBERSHIP.read_text() if _MEMBERSHIP.exists() else "", _ROOT))
    total = min([machine.total, *(limit for limit, _ in limits)])
    free = min([machine.available, *(limit - used for limit, used in limits)])
    return total, max(0, free)


def memory_limits(membership: str, root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the used bytes of each control group above a process.

    Args:
        membership: Text of /proc/self/cgroup.
        root: Directory where the control groups are mounted.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, files = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        group = base / path.strip("/")
        # In a container the path may be the host's. Then only the root of the mount has files.
        for directory in [group, *group.parents]:
            if directory.is_relative_to(base) and (found := _limit(directory, *files)):
                yield found


def _limit(directory: Path, limit: str, used: str, cache: str) -> tuple[int, int] | None:
    if not ((directory / limit).exists() and (directory / used).exists()):
        return None
    text = (directory / limit).read_text().strip()
    if text == "max" or int(text) >= _UNLIMITED:
        return None
    # The kernel drops these cached file pages when it needs memory.
    stat = directory / "memory.stat"
    lines = stat.read_text().splitlines() if stat.exists() else []
    droppable = next((int(line.split()[1]) for line in lines if line.split()[0] == cache), 0)
    return int(text), int((directory / used).read_text()) - droppable
