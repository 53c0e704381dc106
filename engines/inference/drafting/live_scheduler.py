"""Scheduler for live sequences of a draft model, on top of vLLM's (vLLM 0.32).

Its decoding steps go past vLLM's scheduler (`decode_steps`), and its sequences have no outputs.
"""

from collections.abc import Collection
from itertools import chain, islice
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from refrain.engines.inference.engine.decode_steps import DecodeSteps


class LiveScheduler(DecodeSteps, Scheduler):
    """Scheduler that runs chosen sequences. Paused sequences are in none of vLLM's queues."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drawn: dict[str, int] = {}
        """Token that each sequence drew in the last step, if it drew one."""
        self._resting: dict[str, Request] = {}
        """Paused sequences. The one that has paused longest comes first."""
        self._brief: SchedulerOutput | None = None
        """The current step, or None if vLLM has scheduled it."""

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
        self._brief = self._decode_step()
        return self._brief or super().schedule(throttle_prefills)

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
            self.requests[id].num_in_flight_tokens = 0
        return {}
