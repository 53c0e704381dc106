"""Start Ray, and print the files of refrain's packages and the `sys.path` of one of its workers."""

import importlib
import json
import sys

from refrain.engines.actors import RemoteActor
from refrain.flows.environment import quieten
from refrain.tasks.run.ray_cluster import ray_cluster

PACKAGES = ("schemas", "tasks", "engines", "flows")


class Looker:
    def look(self) -> dict[str, list[str]]:
        files = [str(importlib.import_module(name).__file__) for name in PACKAGES]
        return {"files": files, "path": sys.path}


def main() -> None:
    quieten()
    import ray

    with ray_cluster("packages"):
        print(json.dumps(ray.get(RemoteActor("it", Looker).handle.look.remote())))
