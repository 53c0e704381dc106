"""The software and hardware of a run: package versions, the code's commit, CPUs and GPUs."""

import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from refrain.engines.machine.cuda import installed_vllm
from refrain.schemas.base import Frozen
from refrain.schemas.version import VERSION

PACKAGES = ("torch", "ray", "prefect", "mlflow", "duckdb", "transformers")
_ACCELERATOR = "accelerator_type:"
"""Prefix of the Ray resource that names the kind of a node's GPUs."""


class Environment(Frozen):
    """Software and hardware when a process of the run started."""

    versions: dict[str, str]
    """Versions of Python and packages."""
    commit: str | None
    """Commit of the code in a git checkout, with `+` when files differ from the commit."""
    cpu: str
    num_cpus: int
    """CPU cores of the whole cluster, by Ray's count."""
    gpus: dict[str, int]
    """Number of GPUs in the cluster, by kind."""
    num_nodes: int

    @property
    def tags(self) -> dict[str, str]:
        """Return the environment as MLflow tags, whose names never change."""
        tags = {f"environment.{name}": number for name, number in self.versions.items()}
        tags["environment.cpu"] = f"{self.num_cpus} x {self.cpu}"
        tags["environment.gpu"] = ", ".join(f"{n} x {kind}" for kind, n in self.gpus.items())
        tags["environment.num_nodes"] = str(self.num_nodes)
        # MLflow's page shows the tag of this name as the run's version.
        return tags | ({"mlflow.source.git.commit": self.commit} if self.commit else {})


def find_environment(nodes: Sequence[Mapping[str, Any]]) -> Environment:
    """Return the environment of this process and its cluster. `nodes`: from `ray.nodes()`."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    return Environment(
        versions={"python": platform.python_version(), **_versions()},
        commit=find_commit(Path(__file__).parent),
        cpu=_cpu_name(),
        num_cpus=int(sum(resources.get("CPU", 0) for resources in alive)),
        gpus=count_gpus(alive),
        num_nodes=len(alive),
    )


def count_gpus(nodes: Sequence[Mapping[str, float]]) -> dict[str, int]:
    """Return the number of GPUs by kind. `nodes`: Ray's resources of each node."""
    counts = Counter[str]()
    for resources in nodes:
        kinds = [name.removeprefix(_ACCELERATOR) for name in resources if _ACCELERATOR in name]
        if num_gpus := int(resources.get("GPU", 0)):
            counts[kinds[0] if kinds else "GPU"] += num_gpus
    return dict(counts)


def find_commit(directory: Path) -> str | None:
    """Return the commit of a git checkout, or None outside of one or without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--dirty=+"], capture_output=True, text=True, timeout=10.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {"refrain": VERSION} | {name: version(name) for name in PACKAGES}
    for build in installed_vllm():
        found["vllm"] = version(build)
    return found


def _cpu_name() -> str:
    """Return the name of the CPU of the driver's machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
