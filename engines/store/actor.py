"""The process that owns a run's store.

Reads run in parallel; writes wait for the store's lock. Every method is idempotent, so Ray may
restart the process and repeat a call. An acknowledged write is in the file.
"""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.actors import RemoteActor
from engines.bounded import wait_for
from engines.rollout.interface import EngineDied
from schemas.rollout import FinishedRollout

if TYPE_CHECKING:
    import pyarrow as pa

CALL_TIMEOUT_S = 600.0
"""Longest time for one call to the store."""
LOCK_TIMEOUT_S = 60.0
"""Longest wait for the file's lock. The store's process may outlive a killed run by seconds."""
FETCH_TIMEOUT_S = 120.0
"""Longest time to fetch an engine's rows. The store counts later rows as lost."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of a table's rows, for processes that do not have the table."""

    num_rows: int
    num_tokens: int
    """Response tokens."""
    prompt_keys: tuple[str, ...]
    """Distinct prompt keys."""


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of the store, by reference. Only the process that needs the rows fetches them."""

    reference: Any
    """Ray object reference to the table, or the table itself."""
    counts: RowCounts


class StoreTimeout(RuntimeError):
    """The store did not answer in time."""


class StoreActor:
    """A `Store` in its own process, the only one that loads DuckDB."""

    def __init__(self, path: Path) -> None:
        from engines.store.listener import listen
        from engines.store.store import Store

        self._store = Store(path, lock_timeout_s=LOCK_TIMEOUT_S)
        try:
            listen(path.parent, self._store.snapshot)
        except OSError as error:
            print(f"`refrain sql` cannot reach this run while it is live: {error}")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, method)(*args, **kwargs)

    def rows(self, method: str, *args: Any) -> "tuple[RowCounts, pa.Table]":
        """Return the counts and the table as two Ray objects, so that a caller can pass on the
        table without reading it."""
        table = self.call(method, *args)
        return count_rows(table), table

    def keep(self, rows: Sequence[Any], selected: list[int], epoch: int) -> str:
        """Add selected rollouts of an engine's rows. If the rows are lost, return the reason.

        `rows`: a list with one table or one reference to a table. Without the list, Ray would
        resolve the reference before the call, without a time limit.
        """
        import ray
        from ray.exceptions import RayError

        (table,) = rows
        if isinstance(table, ray.ObjectRef):
            try:
                table = ray.get(table, timeout=FETCH_TIMEOUT_S)
            except RayError as error:  # The rows are late or lost.
                return f"{type(error).__name__}: {error}"
        self._store.add_rollouts(table.take(selected), epoch)
        return ""


def start_store(path: Path, found_by: str | None = None, **options: Any) -> Any:
    """Start the store's actor on this node and return its handle.

    The actor's `call` takes the name of a method of `Store`. `found_by`: the name by which other
    processes find the actor. `options`: Ray actor options. When the store cannot be opened, the
    first call raises the error.
    """
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    options = {"max_concurrency": 8, "max_restarts": 3, "max_task_retries": 3} | options
    return RemoteActor(
        "store", StoreActor, path.absolute(), node_id=node_id, found_by=found_by, **options
    ).handle


class StoreClient:
    """A process's client of the store's actor. Every wait has a time limit."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the `Store`."""
        return await _answer(method, self._actor.call.remote(method, *args, **kwargs))

    async def add_finished(self, rollouts: Sequence[FinishedRollout], epoch: int) -> None:
        """Store rollouts that one engine reported in one table.

        Raise `EngineDied` when their tokens are lost.
        """
        reference, selected = rollouts[0].rows, [rollout.row for rollout in rollouts]
        assert all(rollout.rows is reference for rollout in rollouts)
        if why := await self._keep(reference, selected, epoch):
            lost = f"{len(rollouts)} finished rollouts were lost before they were stored: {why}"
            raise EngineDied(rollouts[0].engine, lost)

    async def _keep(self, reference: Any, selected: list[int], epoch: int) -> str:
        return await _answer("keep", self._actor.keep.remote([reference], selected, epoch))

    async def rows(self, method: str, *args: Any) -> StoredRows:
        """Return a reference to the table that a `Store` method returns, and its counts."""
        counts, table = self._actor.rows.options(num_returns=2).remote(method, *args)
        return StoredRows(table, await _answer(method, counts))


async def _answer(method: str, reply: Awaitable[Any]) -> Any:
    try:
        return await wait_for(reply, CALL_TIMEOUT_S)
    except TimeoutError as error:
        raise StoreTimeout(f"store ({method}): no answer in {CALL_TIMEOUT_S:.0f} s") from error


def count_rows(table: "pa.Table") -> RowCounts:
    num_tokens = sum(len(chunk.flatten()) for chunk in table["response_token_ids"].chunks)
    prompt_keys = tuple(table["prompt_key"].unique().to_pylist())
    return RowCounts(table.num_rows, num_tokens, prompt_keys)
