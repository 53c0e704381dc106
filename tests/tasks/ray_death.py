"""Kills a process of a Ray of its own, and prints after how long that was known, and how."""

import asyncio
import json
import sys
import time

import psutil

from flows.environment import quieten


async def wait_for_death(name: str, signal_number: int) -> dict[str, object]:
    from tasks.run.ray_cluster import RayDied, ray_cluster, while_ray_lives

    with ray_cluster("death", 0, "nothing"):
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


if __name__ == "__main__":
    quieten()
    started = asyncio.run(wait_for_death(sys.argv[1], int(sys.argv[2])))
    print(json.dumps(started))
