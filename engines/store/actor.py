"""The process that owns a run's store.

Reads run in parallel; writes wait for the store's lock. Every method is idempotent, so Ray may
restart the process and repeat a call. An acknowledged write is in the file.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refrain.engines.actors import RemoteActor
from refrain.engines.bounded import wait_for
from refrain.engines.rollout.interface import EngineDied
from refrain.schemas.rollout import FinishedRollout

if TYPE_CHECKING:
    import pyarrow as pa

CALL_TIMEOUT_S = 600.0
"""Longest time for one call to the store."""
LOCK_TIMEOUT_S = 60.0
"""Longest wait for the file's lock. The store's process may outlive a killed run by seconds."""
FETCH_TIMEOUT_S = 120.0
"""Longest time to fetch an engine's rows. The store counts later rows as lost."""

TOKENS_AT_ONCE = 8 * 2**20
"""Most tokens of one write, if it has rollouts of several engines. They take 8 bytes each."""

Batch = tuple[Any, list[int], int]
"""Rows of an engine (a table, or a reference to its Arrow stream), which to store, their epoch."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Counts of a table's rows, for processes that do not have the table."""

    num_rows: int
    num_tokens: int
    """Sampled tokens of the responses."""
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
        from refrain.engines.store.listener import listen
        from refrain.engines.store.store import Store

        self._store = Store(path, lock_timeout_s=LOCK_TIMEOUT_S)
        try:
            listen(path.parent, self._store.snapshot)
        except OSError as error:
            print(f"`refrain sql` cannot reach this run while it is live: {error}")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._store, method)(*args, **kwargs)

    def rows(self, method: str, *args: Any, **kwargs: Any) -> "tuple[RowCounts, pa.Table]":
        """Return the counts and the table as two Ray objects, so that a caller can pass on the
        table without reading it."""
        table = self.call(method, *args, **kwargs)
        return count_rows(table), table

    def keep(self, batches: Sequence[Batch]) -> list[str]:
        """Add rollouts of several engines in one transaction. Return for each engine the reason if
        its rows are lost, or an empty string.

        Outside of the list, Ray would resolve references before the call, without a time limit.
        """
        import pyarrow as pa

        until_s = time.monotonic() + FETCH_TIMEOUT_S
        tables, lost = defaultdict(list), []
        for rows, selected, epoch in batches:
            table, why = _fetched(rows, max(0.0, until_s - time.monotonic()))
            lost.append(why)
            if table is not None:
                whole = selected == list(range(table.num_rows))
                tables[epoch].append(table if whole else table.take(selected))
        for epoch, added in tables.items():
            self._store.add_rollouts(pa.concat_tables(added), epoch)
        return lost


def _fetched(rows: Any, timeout_s: float) -> "tuple[pa.Table | None, str]":
    """Return the table behind a reference, or why it is late or lost."""
    import ray
    from ray.exceptions import RayError

    from refrain.engines.store.rows import from_stream

    if not isinstance(rows, ray.ObjectRef):
        return rows, ""
    try:
        return from_stream(ray.get(rows, timeout=timeout_s)), ""
    except RayError as error:
        return None, f"{type(error).__name__}: {error}"


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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Rollouts of one engine that no write has yet."""

    batch: Batch
    num_tokens: int
    answer: asyncio.Future[str]


class StoreClient:
    """A process's client of the store's actor. Every wait has a time limit."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._waiting: deque[_Waiting] = deque()
        self._keeping: asyncio.Task[None] | None = None

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the `Store`."""
        return await _answer(method, self._actor.call.remote(method, *args, **kwargs))

    async def add_finished(self, rollouts: Sequence[FinishedRollout], epoch: int) -> None:
        """Store rollouts that one engine reported in one table.

        The store writes rollouts together that come at the same time, or during a write. Raise
        `EngineDied` when their tokens are lost.
        """
        reference, selected = rollouts[0].rows, [rollout.row for rollout in rollouts]
        assert all(rollout.rows is reference for rollout in rollouts)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        num_tokens = sum(rollout.num_tokens + rollout.num_observed for rollout in rollouts)
        self._waiting.append(_Waiting((reference, selected, epoch), num_tokens, answer))
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep_waiting())
        if why := await answer:
            lost = f"{len(rollouts)} finished rollouts were lost before they were stored: {why}"
            raise EngineDied(rollouts[0].engine, lost)

    async def _keep_waiting(self) -> None:
        while self._waiting:
            waiting = self._next()
            try:
                lost = await self._keep([one.batch for one in waiting])
            except Exception as error:
                for one in waiting:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one, why in zip(waiting, lost, strict=True):
                if not one.answer.done():
                    one.answer.set_result(why)

    def _next(self) -> "list[_Waiting]":
        """Return rollouts for one write."""
        found = [self._waiting.popleft()]
        num_tokens = found[0].num_tokens
        while self._waiting and num_tokens + self._waiting[0].num_tokens <= TOKENS_AT_ONCE:
            found.append(self._waiting.popleft())
            num_tokens += found[-1].num_tokens
        return found

    async def _keep(self, batches: list[Batch]) -> list[str]:
        return await _answer("keep", self._actor.keep.remote(batches))

    async def rows(self, method: str, *args: Any, **kwargs: Any) -> StoredRows:
        """Return a reference to the table that a `Store` method returns, and its counts."""
        counts, table = self._actor.rows.options(num_returns=2).remote(method, *args, **kwargs)
        return StoredRows(table, await _answer(method, counts))


def find_store(name: str) -> StoreClient:
    """Return a client of the store's actor that has this name."""
    import ray

    return StoreClient(ray.get_actor(name))


async def _answer(method: str, reply: Awaitable[Any]) -> Any:
    try:
        return await wait_for(reply, CALL_TIMEOUT_S)
    except TimeoutError as error:
        raise StoreTimeout(f"store ({method}): no answer in {CALL_TIMEOUT_S:.0f} s") from error


def count_rows(table: "pa.Table") -> RowCounts:
    num_tokens = sum(len(chunk.flatten()) for chunk in table["response_token_ids"].chunks)
    num_tokens -= sum(_num_observed(chunk) for chunk in table["turns"].chunks)
    prompt_keys = tuple(table["prompt_key"].unique().to_pylist())
    return RowCounts(table.num_rows, num_tokens, prompt_keys)


def _num_observed(turns: "pa.ListArray") -> int:
    """Return the observed tokens of these rows' turns."""
    return int(turns.flatten().field("num_observed").fill_null(0).to_numpy().sum())
