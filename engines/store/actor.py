"""The process that owns a run's store.

Reads overlap; writes queue behind the store's lock. Every method may be called twice with the same
effect as once, so Ray may restart the process and call again: what was acknowledged is in the file.
"""

from pathlib import Path
from typing import Any

LOCK_TIMEOUT_S = 60.0
"""A run that was killed may leave its store's process alive for some seconds."""


class StoreActor:
    """A `Store`; DuckDB is loaded in this process only."""

    def __init__(self, path: Path) -> None:
        from engines.store.store import Store

        self._store = Store(path, lock_timeout_s=LOCK_TIMEOUT_S)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, method)(*args, **kwargs)


def start_store(path: Path, **options: Any) -> Any:
    """Start the actor on this node; its `call` takes the name of a method of `Store`.

    `options` go to Ray (`name`, `namespace`, `resources` ...). An error in opening the store is
    raised by the first call.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    defaults = {
        "num_cpus": 0,
        "max_concurrency": 8,
        "max_restarts": 3,
        "max_task_retries": 3,
        "scheduling_strategy": here,
    }
    actor: Any = ray.remote(StoreActor).options(**(defaults | options))
    return actor.remote(path.absolute())
