"""Which requests of a model runner have keys and values, and in which blocks (vLLM 0.32).

V1 runner   A request is in the batch of the last step, or an empty step has removed it from there.
V2 runner   A request is in its slot until it ends or is preempted.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

HeldKV = dict[str, tuple[int, list[int]]]
"""(Tokens with keys and values, block ids) of requests, by vLLM's names."""


class KVOfRunner(Protocol):
    """Reads a runner between two steps."""

    def held(self) -> HeldKV:
        """Return all requests whose keys and values are here."""
        ...


def kv_of(runner: Any, is_v2: bool, forget: Callable[[Iterable[str]], None]) -> KVOfRunner:
    """Return the reader of this runner. Call once, before the first request.

    `forget`: called with the names of requests that lost their blocks, before blocks are reused.
    """
    return (KVOfV2Runner if is_v2 else KVOfV1Runner)(runner, forget)


class KVOfV1Runner:
    """vLLM runs an empty step to report ended requests, even while the engine is paused. The other
    requests leave the batch then, but still have their keys and values."""

    def __init__(self, runner: Any, forget: Callable[[Iterable[str]], None]) -> None:
        self._runner = runner
        self._left_out: HeldKV = {}
        """Requests that an empty step has removed from the batch."""
        update = runner._update_states

        def remember(step: Any) -> Any:
            forget(step.finished_req_ids)
            forget(step.preempted_req_ids or ())
            forget(step.scheduled_cached_reqs.resumed_req_ids)
            if step.total_num_scheduled_tokens:
                self._left_out = {}
            elif runner.input_batch.req_id_to_index:
                self._left_out = self._in_batch()
            return update(step)

        runner._update_states = remember

    def held(self) -> HeldKV:
        return self._in_batch() or self._left_out

    def _in_batch(self) -> HeldKV:
        """Return the requests of the last step. Those that it left out were preempted and have no
        blocks."""
        runner = self._runner
        batch, starts = runner.input_batch, runner.query_start_loc.np
        computed = batch.num_computed_tokens_cpu
        return {
            id: (
                int(computed[row] + starts[row + 1] - starts[row]),
                list(runner.requests[id].block_ids[0]),
            )
            for id, row in batch.req_id_to_index.items()
        }


class KVOfV2Runner:
    """The device has the number of computed tokens, without rejected drafts. To read it is to wait
    for all steps that were launched."""

    def __init__(self, runner: Any, forget: Callable[[Iterable[str]], None]) -> None:
        self._runner = runner
        finish = runner.finish_requests

        def forget_and_finish(step: Any) -> None:
            forget(step.finished_req_ids)
            forget(step.preempted_req_ids or ())
            finish(step)

        runner.finish_requests = forget_and_finish

    def held(self) -> HeldKV:
        states, tables = self._runner.req_states, self._runner.block_tables
        slots = states.req_id_to_index
        rows = list(slots.values())
        computed = states.num_computed_tokens.gpu[rows].tolist()
        num_blocks = tables.num_blocks.np[0, rows].tolist()
        blocks = tables.block_tables[0].gpu[rows, : max(num_blocks, default=0)].tolist()
        return {id: (computed[i], blocks[i][: num_blocks[i]]) for i, id in enumerate(slots)}
