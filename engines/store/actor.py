"""The process that owns a run's store.

Reads overlap; writes queue behind the store's lock. Every method may be called twice with the same
effect as once, so Ray may restart the process and call again: what was acknowledged is in the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.bounded import bounded

if TYPE_CHECKING:
    import pyarrow as pa

CALL_TIMEOUT_S = 600.0
"""Longest time for one call to the store."""
LOCK_TIMEOUT_S = 60.0
"""A run that was killed may leave its store's process alive for some seconds."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of rows where their tokens are not."""

    num_rows: int
    num_tokens: int
    """Response tokens."""
    prompt_keys: tuple[str, ...]
    """Each once."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of the store for another process, which alone fetches them."""

    reference: Any
    """Ray object reference to the table, or the table."""
    counts: RowCounts


class StoreActor:
    """A `Store`; DuckDB is loaded in this process only."""

    def __init__(self, path: Path) -> None:
        from engines.store.store import Store

        self._store = Store(path, lock_timeout_s=LOCK_TIMEOUT_S)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, method)(*args, **kwargs)

    def rows(self, method: str, *args: Any) -> "tuple[RowCounts, pa.Table]":
        """Two replies: a caller may pass on the second without reading it."""
        table = self.call(method, *args)
        return count_rows(table), table


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


class StoreClient:
    """Handle on the store for a process that talks to it. No wait is without bound."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the `Store`."""
        reply = self._actor.call.remote(method, *args, **kwargs)
        return await bounded(reply, CALL_TIMEOUT_S, f"store ({method})")

    async def rows(self, method: str, *args: Any) -> StoredRows:
        """The table that a method of the `Store` returns; it does not come to this process."""
        counts, table = self._actor.rows.options(num_returns=2).remote(method, *args)
        return StoredRows(table, await bounded(counts, CALL_TIMEOUT_S, f"store ({method})"))


def count_rows(table: "pa.Table") -> RowCounts:
    import pyarrow.compute as pc

    num_tokens = pc.sum(pc.list_value_length(table["response_token_ids"])).as_py() or 0
    prompt_keys = tuple(table["prompt_key"].unique().to_pylist())
    return RowCounts(table.num_rows, num_tokens, prompt_keys)
