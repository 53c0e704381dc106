"""The process that owns a run's store.

Reads overlap; writes queue behind the store's lock. Every method may be called twice with the same
effect as once, so Ray may restart the process and call again: what was acknowledged is in the file.
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
"""A run that was killed may leave its store's process alive for some seconds."""
FETCH_TIMEOUT_S = 120.0
"""Longest time in which rows of an engine come to the store: later they count as lost."""


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


class StoreSilent(RuntimeError):
    """The store did not answer in time."""


class StoreActor:
    """A `Store`; DuckDB is loaded in this process only."""

    def __init__(self, path: Path) -> None:
        from engines.store.listener import listen
        from engines.store.store import Store

        self._store = Store(path, lock_timeout_s=LOCK_TIMEOUT_S)
        try:
            listen(path.parent, self._store.snapshot)
        except OSError as error:
            print(f"`refrain sql` will not reach this run: {error}")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, method)(*args, **kwargs)

    def rows(self, method: str, *args: Any) -> "tuple[RowCounts, pa.Table]":
        """Two replies: a caller may pass on the second without reading it."""
        table = self.call(method, *args)
        return count_rows(table), table

    def keep(self, rows: Sequence[Any], selected: list[int], epoch: int) -> str:
        """Add selected rollouts of an engine's rows: one table, or a reference to it, in a list, as
        Ray would otherwise wait for it before the call. Returns why they are lost, if they are."""
        import ray
        from ray.exceptions import RayError

        (table,) = rows
        if isinstance(table, ray.ObjectRef):
            try:
                table = ray.get(table, timeout=FETCH_TIMEOUT_S)
            except RayError as error:  # Not there in time, or never.
                return f"{type(error).__name__}: {error}"
        self._store.add_rollouts(table.take(selected), epoch)
        return ""


def start_store(path: Path, found_by: str | None = None, **options: Any) -> Any:
    """Start the actor on this node; its `call` takes the name of a method of `Store`.

    `found_by`: its name for other processes. `options` go to Ray. An error in opening the store
    is raised by the first call.
    """
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    options = {"max_concurrency": 8, "max_restarts": 3, "max_task_retries": 3} | options
    return RemoteActor(
        "store", StoreActor, path.absolute(), node_id=node_id, found_by=found_by, **options
    ).handle


class StoreClient:
    """Handle on the store for a process that talks to it. No wait is without bound."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the `Store`."""
        return await _answer(method, self._actor.call.remote(method, *args, **kwargs))

    async def add_finished(self, rollouts: Sequence[FinishedRollout], epoch: int) -> None:
        """Make rollouts that one engine told of together durable.

        Raises `EngineDied` when their tokens are lost."""
        reference, selected = rollouts[0].rows, [rollout.row for rollout in rollouts]
        assert all(rollout.rows is reference for rollout in rollouts)
        if why := await self._keep(reference, selected, epoch):
            lost = f"{len(rollouts)} finished rollouts were lost before they were stored: {why}"
            raise EngineDied(rollouts[0].engine, lost)

    async def _keep(self, reference: Any, selected: list[int], epoch: int) -> str:
        return await _answer("keep", self._actor.keep.remote([reference], selected, epoch))

    async def rows(self, method: str, *args: Any) -> StoredRows:
        """The table that a method of the `Store` returns; it does not come to this process."""
        counts, table = self._actor.rows.options(num_returns=2).remote(method, *args)
        return StoredRows(table, await _answer(method, counts))


async def _answer(method: str, reply: Awaitable[Any]) -> Any:
    try:
        return await wait_for(reply, CALL_TIMEOUT_S)
    except TimeoutError as error:
        raise StoreSilent(f"store ({method}): no answer in {CALL_TIMEOUT_S:.0f} s") from error


def count_rows(table: "pa.Table") -> RowCounts:
    num_tokens = sum(len(chunk.flatten()) for chunk in table["response_token_ids"].chunks)
    prompt_keys = tuple(table["prompt_key"].unique().to_pylist())
    return RowCounts(table.num_rows, num_tokens, prompt_keys)
