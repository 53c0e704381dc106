"""A fast scheduler for live sequences, on top of vLLM's (vLLM 0.32).

vLLM's scheduler checks each request for drafts, images, stop tokens and its place in the queue. A
drafter's sequences have none of these. When all sequences are admitted and memory suffices, this
scheduler writes the step down directly. In all other cases it calls vLLM's.
"""

from collections.abc import Collection
from itertools import chain, islice
from typing import Any

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class LiveScheduler(Scheduler):
    """Scheduler that runs chosen sequences. Paused sequences are in none of vLLM's queues."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drawn: dict[str, int] = {}
        """Token that each sequence drew in the last step, if it drew one."""
        self._resting: dict[str, Request] = {}
        """Paused sequences. The one that has paused longest comes first."""
        self._room: dict[str, int] = {}
        """Tokens that the blocks of a sequence can hold, where known."""
        self._brief: SchedulerOutput | None = None
        """The current step, or None if vLLM has scheduled it."""
        block_sizes = [one.block_size for one in self._managers]
        self._block_sizes, self._least_block = block_sizes, min(block_sizes)

    def rest_others(self, ids: Collection[str]) -> None:
        """Let the next step run only these sequences and those that wait for admission."""
        running, others = [], []
        for request in self.running:
            (running if request.request_id in ids else others).append(request)
        room = self.max_num_running_reqs - len(running)
        woken = list(islice((id for id in self._resting if id in ids), room))
        running += [self._resting.pop(id) for id in woken]
        self._resting |= {request.request_id: request for request in others}
        self.running = running
        # The runner still has their tokens. Without this vLLM would send them all again.
        self.prev_step_scheduled_req_ids.update(woken)

    def wake(self, id: str) -> None:
        """Return a paused sequence to vLLM's queue of running requests."""
        if request := self._resting.pop(id, None):
            self.running.append(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._brief = self._brief_step()
        if self._brief is not None:
            return self._brief
        # vLLM may allocate and free blocks.
        self._room.clear()
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        if scheduler_output is not self._brief:
            steps = super().update_from_output(scheduler_output, model_runner_output)
            outputs = chain.from_iterable(step.outputs for step in steps.values())
            self.drawn = {one.request_id: one.new_token_ids[0] for one in outputs}
            return steps
        tokens, rows = model_runner_output.sampled_token_ids, model_runner_output.req_id_to_index
        self.drawn = {id: tokens[rows[id]][0] for id in scheduler_output.num_scheduled_tokens}
        for id, token in self.drawn.items():
            self.requests[id].append_output_token_ids(token)
        return {}

    @property
    def _managers(self) -> tuple[Any, ...]:
        return self.kv_cache_manager.coordinator.single_type_managers

    def _brief_step(self) -> SchedulerOutput | None:
        """Return a step of all running sequences, or None if vLLM must schedule it."""
        running, (_, num_waiting) = self.running, self.get_request_counts()
        if not running or num_waiting or self._inflight_prefills:
            return None
        computed = [request.num_computed_tokens for request in running]
        ends = [request.num_tokens for request in running]
        news = [end - start for start, end in zip(computed, ends, strict=True)]
        if sum(news) > self.max_num_scheduled_tokens or max(ends) + 1 >= self.max_model_len:
            return None
        if (blocks := self._new_blocks(ends, news)) is None:
            return None
        for request, end in zip(running, ends, strict=True):
            request.num_computed_tokens = end
        ids = [request.request_id for request in running]
        self.current_step += 1
        self.prev_step_scheduled_req_ids = set(ids)
        ended, self.finished_req_ids = self.finished_req_ids, set()
        return SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[blocks.get(id) for id in ids],
                num_computed_tokens=computed,
                num_output_tokens=[request.num_output_tokens for request in running],
            ),
            num_scheduled_tokens=dict(zip(ids, news, strict=True)),
            total_num_scheduled_tokens=sum(news),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=ended,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
        )

    def _new_blocks(self, ends: list[int], news: list[int]) -> dict[str, Any] | None:
        """Allocate blocks and return their ids by request. Return None if they may not suffice."""
        room = self._room
        short = [
            (request, end, new)
            for request, end, new in zip(self.running, ends, news, strict=True)
            if end > room.get(request.request_id, 0)
        ]
        most = sum(1 + -(-new // self._least_block) for _, _, new in short)
        manager = self.kv_cache_manager
        if most * len(self._block_sizes) > manager.block_pool.get_num_free_blocks():
            return None
        given: dict[str, Any] = {}
        for request, _, new in short:
            id, blocks = request.request_id, manager.allocate_slots(request, new)
            assert blocks is not None, "blocks were counted"
            given[id] = blocks.get_block_ids(allow_none=True)
            held = zip(manager.get_block_ids(id), self._block_sizes, strict=True)
            room[id] = min(len(ids) * size for ids, size in held)
        return given
