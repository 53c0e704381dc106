"""Nodes that a run may be on: this machine's, or those that `--gpus` names. Pure."""

import re
from dataclasses import dataclass

CARDS_GB = {
    "A10": 24,
    "A10G": 24,
    "A40": 48,
    "A100": 80,
    "B200": 180,
    "GH200": 96,
    "H100": 80,
    "H20": 96,
    "H200": 141,
    "H800": 80,
    "L4": 24,
    "L40S": 48,
    "RTX4090": 24,
    "RTX5090": 32,
}
"""Memory of GPUs by name; of those that there are with several sizes, the largest that is usual."""
_GPUS = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z]\w*)(?:-(\d+)GB)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes and what they have; None: it is not known, and nothing is refused for it."""

    num_nodes: int
    num_gpus: int
    """GPUs of each."""
    gpu_bytes: float
    host_bytes: float | None = None
    """Memory of each."""
    shm_bytes: float | None = None
    """Room in /dev/shm of each."""
    disk_bytes: float | None = None
    """Room for checkpoints."""

    @property
    def free(self) -> dict[str, int]:
        """GPUs by node."""
        return {f"node {i}": self.num_gpus for i in range(self.num_nodes)}


def parse_nodes(text: str) -> Nodes:
    """Nodes that are named as `8xH100-80GB`, `8xH100`, or `2x8xH100-80GB` for two nodes of eight.
    Raises ValueError."""
    found = _GPUS.fullmatch(text.strip())
    if not found:
        raise ValueError(
            f"--gpus {text}: give their number, name and memory, as in 8xH100-80GB, or "
            "2x8xH100-80GB for two nodes"
        )
    num_nodes, num_gpus, name, given = found.groups()
    memory_gb = int(given) if given else CARDS_GB.get(name.upper())
    if memory_gb is None:
        raise ValueError(
            f"--gpus {text}: how much memory has a {name}? Give it, as in {num_gpus}x{name}-80GB; "
            f"known without: {', '.join(CARDS_GB)}"
        )
    if not (memory_gb and int(num_gpus) and int(num_nodes or 1)):
        raise ValueError(f"--gpus {text}: nodes, GPUs and their memory must be above 0")
    return Nodes(int(num_nodes or 1), int(num_gpus), memory_gb * 1e9)
