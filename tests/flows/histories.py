"""Index histories on the cluster that RAY_ADDRESS names, and kill a node.

Each node keeps its indexes below the working directory of its processes. The script prints how many
indexes were built, copied and found, before and after the kill, and which problems were reported.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

from refrain.engines.actors import RemoteActor
from refrain.engines.histospec.workers import HistoryWorkers
from refrain.schemas.drafting import DraftingConfig
from tests.histospec.test_workers import rows_of

DIRECTORY = Path("/proc/self/cwd/history")
ENDING_S = 60.0
KEYS = [f"{n:08x}" for n in range(100)]


async def index() -> dict[str, object]:
    trouble: list[str] = []
    workers = HistoryWorkers(DIRECTORY, DraftingConfig(), trouble.append)
    workers.start()

    async def read(steps):
        return rows_of(steps)

    num_there, counts = [], []
    for _ in range(2):
        num_there.append(await workers.ensure(dict.fromkeys(KEYS, 1), read))
        counts.append(workers.counts())
    scheduling = [await _in(actor, _scheduling) for actor in workers._actors]
    nodes = [await _in(actor, _node) for actor in workers._actors]
    here = ray.get_runtime_context().get_node_id()
    doomed = next(share for share, (node, _) in enumerate(nodes) if node != here)
    raylet = psutil.Process(nodes[doomed][1])
    orphans = raylet.children(recursive=True)
    raylet.kill()
    psutil.wait_procs(orphans, ENDING_S)
    num_there.append(await workers.ensure(dict.fromkeys(KEYS, 1), read))
    counts.append(workers.counts())
    left = [await _in(actor, _node) for actor in workers._actors]
    await workers.shutdown()
    return {
        "num_there": num_there,
        "num_built": [it.num_built for it in counts],
        "num_copied": [it.num_copied for it in counts],
        "cores_and_niceness": scheduling,
        "nodes": [len({node for node, _ in nodes}), len({node for node, _ in left})],
        "trouble": trouble,
    }


async def _in(actor: RemoteActor, ask: Callable[[object], Any]) -> Any:
    return await actor.handle.__ray_call__.remote(ask)


def _node(_: object) -> tuple[str, int]:
    """Return the id of the node, and the process id of its raylet."""
    import os

    return ray.get_runtime_context().get_node_id(), os.getppid()


def _scheduling(_: object) -> tuple[int, int]:
    import os

    return len(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    print(json.dumps(asyncio.run(index())))
