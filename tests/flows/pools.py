"""Reserve GPUs on the cluster that RAY_ADDRESS names, and print where they are.

It holds two pools of two GPUs and prints the error of a third pool. Then it places an engine of two
GPUs beside two trainer ranks.
"""

import asyncio
import json

import ray

from refrain.engines.actors import RemoteActor
from refrain.engines.gpus.place import Place
from refrain.engines.gpus.placement import Wanted, place
from refrain.engines.gpus.reservation import reserve_gpus

START_TIMEOUT_S = 120.0


class Tenant:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


async def reserve() -> dict[str, object]:
    pools = [await reserve_gpus(2, None, START_TIMEOUT_S) for _ in range(2)]
    try:
        await reserve_gpus(1, None, timeout_s=1.0)
        refusal = ""
    except RuntimeError as error:
        refusal = str(error)
    for pool in pools:
        pool.holder.kill()
    return {
        "nodes": [pool.node_id for pool in pools],
        "gpu_ids": [pool.gpu_ids for pool in pools],
        "refusal": refusal,
    }


async def place_engine_beside_ranks() -> dict[str, object]:
    """Start the ranks, then the engine, and return their nodes."""
    nodes = [node for node in ray.nodes() if node["Resources"].get("GPU")]
    wanted = [
        Wanted("trainer", 2, "trainer.num_processes", spreads=True),
        Wanted("engine", 2, "rollout.tp_degree"),
    ]
    planned = place(wanted, {node["NodeID"]: int(node["Resources"]["GPU"]) for node in nodes})
    ranks = [
        RemoteActor(f"rank {i}", Tenant, num_gpus=1, node_id=node, soft=True)
        for i, node in enumerate(planned["trainer"])
    ]
    ranks_at = [await rank.call("node", timeout_s=START_TIMEOUT_S) for rank in ranks]
    there = Place(2, near=planned["engine"][0])
    engine = RemoteActor("engine", Tenant, **there.options)
    return {"ranks": ranks_at, "engine": await engine.call("node", timeout_s=START_TIMEOUT_S)}


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    print(json.dumps(asyncio.run(reserve()) | asyncio.run(place_engine_beside_ranks())))
