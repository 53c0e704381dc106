"""Nodes on which a run is planned: this machine, or the nodes that `--gpus` names. Pure."""

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
"""Memory of GPUs by name, in GB. For a GPU with several sizes, the largest common one."""
_GPUS = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z]\w*)(?:-(\d+)GB)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes and their resources. None: unknown; then no run is refused for lack of it."""

    num_nodes: int
    num_gpus: int
    """GPUs per node."""
    gpu_bytes: float
    """Memory per GPU."""
    host_bytes: float | None = None
    """Host memory per node."""
    shm_bytes: float | None = None
    """Size of /dev/shm per node."""
    disk_bytes: float | None = None
    """Free space for checkpoints."""

    @property
    def free(self) -> dict[str, int]:
        """Number of GPUs by node name."""
        return {f"node {i}": self.num_gpus for i in range(self.num_nodes)}


def parse_nodes(text: str) -> Nodes:
    """Parse nodes such as `8xH100-80GB`, `8xH100`, or `2x8xH100-80GB` for two nodes of eight GPUs.

    Raise ValueError for another text.
    """
    found = _GPUS.fullmatch(text.strip())
    if not found:
        raise ValueError(
            f"--gpus {text}: give the number, name and memory of the GPUs, for example "
            "8xH100-80GB, or 2x8xH100-80GB for two nodes"
        )
    num_nodes, num_gpus, name, given = found.groups()
    memory_gb = int(given) if given else CARDS_GB.get(name.upper())
    if memory_gb is None:
        raise ValueError(
            f"--gpus {text}: the memory of a {name} is unknown. Add it, for example "
            f"{num_gpus}x{name}-80GB. Known GPUs: {', '.join(CARDS_GB)}"
        )
    if not (memory_gb and int(num_gpus) and int(num_nodes or 1)):
        raise ValueError(f"--gpus {text}: the number of nodes, GPUs and GB must be above 0")
    return Nodes(int(num_nodes or 1), int(num_gpus), memory_gb * 1e9)
