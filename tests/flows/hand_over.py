"""Run `refrain` and kill processes while the GPUs change hands.

    python -m tests.flows.hand_over POINTS train my.yaml ...

POINTS is JSON, [[owner, method, when, number, victim], ...]. For example,
["engines", "leave_gpus", "before", 2, "engine"] kills the first living engine before the second
call of the engines' leave_gpus. `when` is before, during or after.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import psutil

from refrain.engines.learn.trainer import TrainerGroup
from refrain.engines.rollout.coordinator import Coordinator
from refrain.flows.cli import main

OWNERS: dict[str, type] = {"engines": Coordinator, "trainer": TrainerGroup}
ACTORS = {"engine": "ray::VLLMEngine", "trainer": "ray::TrainerActor"}
DURING_S = 0.01


def kill(victim: str) -> None:
    run_dir = os.environ["REFRAIN_RUN_DIR"]
    for process in psutil.process_iter(["name", "cmdline"]):
        name = " ".join(process.info["cmdline"] or []) or process.info["name"]
        if not name.startswith(ACTORS[victim]):
            continue
        if process.environ().get("REFRAIN_RUN_DIR") == run_dir:
            process.kill()
            print(f"killed: {victim}", flush=True)
            return
    raise AssertionError(f"there is no {victim}")


def strike(points: list[list[Any]]) -> None:
    """Patch the owners' methods so that they kill at the given points."""
    for name, owner in OWNERS.items():
        for method in ("leave_gpus", "enter_gpus"):
            own = [point[2:] for point in points if point[:2] == [name, method]]
            setattr(owner, method, _struck(getattr(owner, method), own))


def _struck(
    method: Callable[[Any], Awaitable[None]], points: list[list[Any]]
) -> Callable[[Any], Awaitable[None]]:
    calls = Counter[str]()

    async def struck(self: Any) -> None:
        calls["all"] += 1
        now = {when: victim for when, number, victim in points if number == calls["all"]}
        if "before" in now:
            kill(now["before"])
        if "during" in now:
            asyncio.get_running_loop().call_later(DURING_S, kill, now["during"])
        await method(self)
        if "after" in now:
            kill(now["after"])

    return struck


if __name__ == "__main__":
    strike(json.loads(sys.argv[1]))
    sys.argv[1:] = sys.argv[2:]
    main()
