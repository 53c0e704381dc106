"""Start Ray and kill one of its processes, or kill a node that a cluster needs. Print the error
that the run raised, and how many seconds after the kill."""

import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import psutil

from refrain.flows.environment import quieten
from tests.ray_token import make_token


async def wait_for_death(name: str, signal_number: int) -> dict[str, object]:
    from refrain.tasks.run.ray_cluster import RayDied, ray_cluster, while_ray_lives

    with ray_cluster("death"):
        (victim,) = (child for child in psutil.Process().children() if child.name() == name)
        started_s = time.monotonic()
        try:
            async with while_ray_lives("Go on by --resume."):
                await asyncio.sleep(0.5)
                victim.send_signal(signal_number)
                await asyncio.sleep(120.0)
        except RayDied as death:
            known_s = time.monotonic() - started_s
            return {"known_s": known_s, "told": str(death), "why": str(death.__cause__)}
        finally:
            victim.kill()
    raise AssertionError("nobody noticed")


def kill_nodes() -> dict[str, object]:
    """Kill a node that the run does not need. Wait until Ray must have noticed, then kill one that
    it needs."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False})
    try:
        needed, other = cluster.add_node(), cluster.add_node()
        driver = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "driver", needed.node_id],
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout is not None
        while driver.stdout.readline() != "watching\n":
            assert driver.poll() is None
        kill(other)
        time.sleep(30.0)
        killed_s = time.monotonic()
        kill(needed)
        told = json.loads(driver.communicate(timeout=120.0)[0].splitlines()[-1])
        return {"known_s": told["at_s"] - killed_s, "told": told["told"]}
    finally:
        cluster.shutdown()


async def drive(node_id: str) -> dict[str, object]:
    from refrain.tasks.run.ray_cluster import RayDied, ray_cluster, while_ray_lives

    with ray_cluster("death"):
        try:
            async with while_ray_lives("Go on by --resume.", {node_id: "the trainer"}):
                print("watching", flush=True)
                await asyncio.sleep(120.0)
        except RayDied as death:
            return {"at_s": time.monotonic(), "told": str(death)}
    raise AssertionError("nobody noticed")


def kill(node: Any, *, with_all: bool = False) -> None:
    """Kill the raylet of a node, and with `with_all` every process that it has started."""
    (started,) = node.all_processes["raylet"]
    raylet = psutil.Process(started.process.pid)
    children = raylet.children(recursive=True) if with_all else []
    for process in [raylet, *children]:
        process.kill()


if __name__ == "__main__":
    quieten()
    match sys.argv[1:]:
        case ["driver", node_id]:
            told = asyncio.run(drive(node_id))
        case ["node", _]:
            make_token()
            told = kill_nodes()
        case [name, signal_number]:
            told = asyncio.run(wait_for_death(name, int(signal_number)))
    print(json.dumps(told))
