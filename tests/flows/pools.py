"""Two pools of two GPUs on the cluster that RAY_ADDRESS names; prints where they are, and what is
said of a third."""

import asyncio
import json

import ray

from engines.inference.gpus.held import hold_gpus

START_TIMEOUT_S = 120.0


async def hold() -> dict[str, object]:
    pools = [await hold_gpus(2, None, START_TIMEOUT_S) for _ in range(2)]
    try:
        await hold_gpus(1, None, timeout_s=1.0)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    return {
        "nodes": [pool.node_id for pool in pools],
        "gpu_ids": [pool.gpu_ids for pool in pools],
        "refusal": refusal,
    }


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    print(json.dumps(asyncio.run(hold())))
