"""Histories on the cluster that RAY_ADDRESS names, in a directory that each node has for itself:
that of its processes. Prints what was built and copied, and what was told."""

import asyncio
import json
from pathlib import Path

import ray

from engines.histospec.workers import HistoryWorkers
from schemas.drafting import DraftingConfig
from tests.histospec.test_workers import rows_of

DIRECTORY = Path("/proc/self/cwd/history")
KEYS = [f"{n:08x}" for n in range(100)]


async def index() -> dict[str, object]:
    trouble: list[str] = []
    workers = HistoryWorkers(DIRECTORY, DraftingConfig(index_cpus=1), trouble.append)
    workers.start()

    async def read(steps):
        return rows_of(steps)

    num_there, counts = [], []
    for _ in range(2):
        num_there.append(await workers.ensure(dict.fromkeys(KEYS, 1), read))
        counts.append(workers.counts())
    pids = [await actor.handle.__ray_call__.remote(_scheduling) for actor in workers._actors]
    await workers.shutdown()
    return {
        "num_there": num_there,
        "num_built": [it.num_built for it in counts],
        "num_copied": [it.num_copied for it in counts],
        "cores_and_niceness": pids,
        "trouble": trouble,
    }


def _scheduling(_: object) -> tuple[int, int]:
    import os

    return len(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    print(json.dumps(asyncio.run(index())))
