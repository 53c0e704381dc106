"""Send weights to the other nodes of a cluster, and print which files were where, as JSON.

Starts a cluster of its own. Instead of engines, simple actors read the weights.
"""

import json
import time
from pathlib import Path
from typing import Any

from refrain.engines.shared_memory import clear_dead
from refrain.flows.environment import quieten
from refrain.schemas.weights import PolicyWeights, WeightsFile
from tests.ray_token import make_token

NUM, SIZE = 10, 2**22
"""Number of tensors and elements of each: 168 MB, sent in three parts."""
LIMIT_S = 60.0


class Reader:
    """Actor that reads weights as a worker of an engine does."""

    def __init__(self) -> None:
        from refrain.engines.inference.weights.source import WeightSources

        self._sources = WeightSources(0, LIMIT_S)

    async def read(self, weights: PolicyWeights) -> tuple[str, list[float]]:
        from safetensors import safe_open

        async with self._sources.file_of(weights) as path:
            with safe_open(path, framework="pt") as tensors:
                values = [tensors.get_tensor(f"t{i}") for i in range(NUM)]
                assert all(bool((v == v[0]).all()) for v in values)
                return str(path), [v[0].item() for v in values]


def write(files: Any, version: int, node_id: str) -> PolicyWeights:
    import torch

    from refrain.engines.learn.publishing import WholeTensors, publish

    tensors = ((f"t{i}", torch.full((SIZE,), float(i + version))) for i in range(NUM))
    whole = WholeTensors({f"t{i}": (SIZE,) for i in range(NUM)}, tensors, torch.float32)
    path = publish(whole, version, files)
    file = WeightsFile(path, path.stat().st_size, files.num_kept, node_id)
    return PolicyWeights(version, file, ())


def until_there(path: Path) -> None:
    ends_s = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < ends_s, f"the courier did not write {path.name}"
        time.sleep(0.05)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def carry(here: str, there: str, others: list[str]) -> dict[str, Any]:
    import ray

    from refrain.engines.actors import RemoteActor
    from refrain.engines.couriers import Couriers, courier_of
    from refrain.engines.weights_file import VersionFiles

    def read(reader: RemoteActor, weights: PolicyWeights) -> Any:
        return reader.handle.read.remote(weights)

    files, couriers = VersionFiles(2), Couriers(here)
    near = RemoteActor("reader", Reader, node_id=here)
    far = [RemoteActor("reader", Reader, node_id=there) for _ in range(2)]
    shown: dict[str, Any] = {"values": []}

    first = write(files, 0, here)
    couriers.prefetch(0, first.source)
    size = first.source.num_bytes
    kept = courier_of(there)
    told = ray.get([read(r, first) for r in (near, *far)], timeout=LIMIT_S)
    shown["values"] += [values for _, values in told]
    shown["one_file_a_node"] = told[0][0] == str(first.source.path) != told[1][0] == told[2][0]
    shown["times_brought"] = ray.get(kept.handle.num_bytes_fetched.remote()) / size

    second = write(files, 1, here)
    couriers.prefetch(1, second.source)
    directory = Path(told[1][0]).parent
    until_there(directory / "1.safetensors")
    shown["before_it_is_asked_for"] = names(directory)
    third = write(files, 2, here)
    couriers.prefetch(2, third.source)
    told = ray.get([read(r, w) for r in far for w in (second, third)], timeout=LIMIT_S)
    shown["values"] += [values for _, values in told]
    shown["times_in_all"] = ray.get(kept.handle.num_bytes_fetched.remote()) / size
    shown["last"] = names(directory)

    try:
        ray.get(read(far[0], first), timeout=LIMIT_S)
    except ray.exceptions.RayTaskError as error:
        shown["too_old"] = f"{type(error.cause).__name__}: {error.cause}"

    ray.kill(kept.handle)
    told = ray.get([read(far[0], third), read(far[1], third)], timeout=LIMIT_S)
    shown["values"] += [values for _, values in told]
    directory = Path(told[0][0]).parent
    shown["after_a_death"] = names(directory)
    courier_of(there).handle.delete.remote()
    ends_s = time.monotonic() + LIMIT_S
    while directory.exists() and time.monotonic() < ends_s:
        time.sleep(0.05)
    shown["left"] = directory.exists()
    shown |= pass_on(files, here, [there, *others])
    files.delete()
    return shown


def pass_on(files: Any, here: str, there: list[str]) -> dict[str, Any]:
    """Send two versions to three nodes. The last one reads from the first, which is then killed."""
    import ray

    from refrain.engines.actors import RemoteActor
    from refrain.engines.couriers import courier_of

    origin = courier_of(here).handle
    readers = [RemoteActor("reader", Reader, node_id=node) for node in there]
    size, before, values = 0, ray.get(origin.num_bytes_sent.remote()), []
    for version in (3, 4):
        weights = write(files, version, here)
        size = weights.source.num_bytes
        for reader in readers[:-1]:
            values.append(ray.get(reader.handle.read.remote(weights), timeout=LIMIT_S))
        last, parent = readers[-1].handle.read.remote(weights), courier_of(there[0]).handle
        if version == 3:
            values.append(ray.get(last, timeout=LIMIT_S))
            sent = ray.get([origin.num_bytes_sent.remote(), parent.num_bytes_sent.remote()])
        else:
            ray.kill(parent)
            values.append(ray.get(last, timeout=LIMIT_S))
    return {
        "passed_on": [told for _, told in values],
        "origin_sent": (sent[0] - before) / size,
        "parent_sent": sent[1] / size,
    }


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False})
    there, *others = (cluster.add_node().node_id for _ in range(3))
    try:
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
        here = ray.get_runtime_context().get_node_id()
        print(json.dumps(carry(here, there, others)))
    finally:
        ray.shutdown()
        cluster.shutdown()
        clear_dead()  # Files of killed couriers.


if __name__ == "__main__":
    quieten()
    make_token()
    main()
