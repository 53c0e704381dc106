"""vLLM's schedulers (vLLM 0.32), extended.

- All requests of one submission start in the same step (`arrivals`).
- Responses end at stop strings (`stopping`).
- Outputs are buffered (`output_buffer`).
- Steps that only decode take a short way (`decode_steps`).
- Long canaries are scored in chunks.
- A request whose prompt is in the KV cache begins without drafts.
- Requests whose keys and values could not be loaded begin anew.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from refrain.engines.inference.engine.arrivals import BATCH, Arrivals
from refrain.engines.inference.engine.decode_steps import DecodeSteps, Decoding
from refrain.engines.inference.engine.stopping import STOP, StopStrings
from refrain.schemas.config import EngineConfig
from refrain.schemas.engine import EngineSetup

if TYPE_CHECKING:
    from refrain.engines.inference.drafting.room import DraftRoom

SCORED_TOKENS = 256
"""Most tokens of a step that scores prompt tokens.

Each scored token needs logits over the whole vocabulary, for which vLLM reserves no memory. With a
vocabulary of 150,000 this many tokens take 0.4 GB.
"""


class _Holding(DecodeSteps):
    """Mixin with these extensions, for both of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streamed: set[str] = set()
        """Unfinished requests whose front end wants each token at once."""
        self._scored: set[str] = set()
        """Unfinished requests that score more prompt tokens than fit into one step."""
        self._rollouts: dict[str, Decoding] = {}
        """Unfinished requests that only generate tokens."""
        self._decoding: dict[str, Decoding] = {}
        """Those of them whose next tokens need vLLM only if they end the request."""
        self._arrivals = Arrivals()
        self._stop_strings = cache(self._stop_strings_of)
        self.room: DraftRoom | None = None
        """Room for drafts on the V2 runner. On V1 the worker decides."""
        if self.num_spec_tokens:
            # vLLM adds drafts that are never right to a request whose prompt is in the KV cache but
            # for one token: its graphs want equally long rows. Ours do not. vLLM adds none where
            # the batch decides how many drafts a request has.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def reserve_room(self, config_json: str, setup_json: str) -> None:
        """Reserve room for drafts. Call before the first request."""
        from refrain.engines.inference.drafting.room import DraftRoom

        config = EngineConfig.model_validate_json(config_json)
        setup = EngineSetup.model_validate_json(setup_json)
        self.room = DraftRoom(self.requests, self.vllm_config, config, setup)

    def record_experts(self) -> None:
        """Pass on the experts that the worker records. Call before the first request."""
        from refrain.engines.inference.engine.expert_recorder import ExpertRows

        self.aux_output_connector: Any = ExpertRows()

    def take_room_counts(self) -> dict[str, Any]:
        """Return fields of `schemas.counts.DraftingCounts` since the last call."""
        assert self.room is not None
        return self.room.take_counts()

    def add_request(self, request: Any) -> None:
        batch = (request.sampling_params.extra_args or {}).get(BATCH)
        self._begin(self._arrivals.begin_with(request, *batch) if batch else [request])

    def _begin(self, requests: Sequence[Any]) -> None:
        for request in requests:
            super().add_request(request)
            if self.room is not None:
                self.room.begin(request)
            if request.sampling_params.output_kind is not RequestOutputKind.FINAL_ONLY:
                self._streamed.add(request.request_id)
            elif rollout := Decoding.of(request, self._stops_of(request), self.max_model_len):
                self._rollouts[request.request_id] = rollout
            scored = request.sampling_params.prompt_logprobs is not None
            if scored and request.num_prompt_tokens > SCORED_TOKENS:
                self._scored.add(request.request_id)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self._scored &= self.requests.keys()
        whole = self.max_num_scheduled_tokens
        if self._scored:
            self.max_num_scheduled_tokens = min(whole, SCORED_TOKENS)
        if self.room is not None:
            self.room.reserve(self.running)
        try:
            step = self._decode_step() or super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = whole
        if self.room is not None:
            self.room.scheduled(step)
        return step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        others = self._append_tokens(scheduler_output, model_runner_output, self._decoding)
        rest = replace(scheduler_output, num_scheduled_tokens=others)
        steps = super().update_from_output(rest, model_runner_output)
        self._sort(others)
        if self.room is not None:
            sampled = model_runner_output.sampled_token_ids
            self.room.updated(scheduler_output, sampled, model_runner_output.req_id_to_index)
        for front_end in self._buffers.keys() | steps.keys():
            step = steps.setdefault(front_end, EngineCoreOutputs())
            step.outputs = self._buffers[front_end].outputs_after(step.outputs, self._streamed)
        self._streamed &= self.requests.keys()
        return {front_end: step for front_end, step in steps.items() if _says_something(step)}

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        given = draft_token_ids.req_ids, draft_token_ids.draft_token_ids
        others = []
        for id, drafts in zip(*given, strict=True):
            if (rollout := self._decoding.get(id)) is not None:
                rollout.request.spec_token_ids = drafts
            else:
                others.append((id, drafts))
        if others:
            ids, drafts = map(list, zip(*others, strict=True))
            super().update_draft_token_ids(DraftTokenIds(ids, drafts))

    def _sort(self, ids: Iterable[str]) -> None:
        """Forget those of these requests that have ended, and note which ones decode."""
        for id in ids:
            if id not in self.requests:
                self._rollouts.pop(id, None)
            rollout = self._rollouts.get(id)
            if rollout is not None and rollout.decodes:
                self._decoding[id] = rollout
            else:
                self._decoding.pop(id, None)

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Begin the requests anew whose keys and values could not be loaded, and return them.

        vLLM would only reduce their number of computed tokens. The V2 runner does not notice that,
        and with asynchronous scheduling the next step already builds on the wrong blocks.
        """
        del num_scheduled_tokens
        connector: Any = self.connector
        self.kv_cache_manager.evict_blocks(invalid_block_ids)
        failed = []
        for request in self.running:
            (blocks,) = self.kv_cache_manager.get_block_ids(request.request_id)
            wrong = [i for i, block in enumerate(blocks) if block in invalid_block_ids]
            if wrong:
                # The blocks after a wrong one were computed from it.
                self.kv_cache_manager.evict_blocks(set(blocks[wrong[0] :]))
                failed.append(request)
        for request in reversed(failed):
            connector.recompute(request.request_id)
            self.running.remove(request)
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
        return {request.request_id for request in failed}

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._sort([request.request_id])

    def _update_request_with_output(
        self, request: Any, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        update = partial(super()._update_request_with_output, request, is_stale=is_stale)
        if (stops := self._stops_of(request)) is None:
            return update(new_token_ids)
        num_prompt_tokens = request.sampling_params.extra_args[STOP][0]
        first = max(num_prompt_tokens, request.num_tokens - stops.num_tokens_before)
        num_kept = stops.num_kept(request.all_token_ids[first:], new_token_ids)
        kept, stopped = update(new_token_ids[:num_kept])
        # The model may have ended the response before the stop string.
        if num_kept is not None and len(kept) == num_kept:
            request.status, stopped = RequestStatus.FINISHED_STOPPED, True
        return kept, stopped

    def _stops_of(self, request: Any) -> StopStrings | None:
        """Return the stop strings of a request, or None."""
        stop = (request.sampling_params.extra_args or {}).get(STOP)
        return self._stop_strings(tuple(stop[1:])) if stop else None

    def _stop_strings_of(self, strings: tuple[str, ...]) -> StopStrings:
        from vllm.tokenizers import cached_tokenizer_from_config

        tokenizer = cached_tokenizer_from_config(self.vllm_config.model_config)
        return StopStrings(strings, partial(tokenizer.decode, skip_special_tokens=False))

    def finish_requests(self, request_ids: Any, finished_status: Any) -> list[Any]:
        self._begin(self._arrivals.begin_at_once())
        ended = super().finish_requests(request_ids, finished_status)
        self._sort([request.request_id for request in ended])
        for buffer in self._buffers.values():
            buffer.forget([request.request_id for request in ended])
        return ended


def _says_something(step: Any) -> bool:
    return bool(step.outputs or step.finished_requests or step.scheduler_stats)


class HoldingScheduler(_Holding, Scheduler):
    """Scheduler of an engine that waits for each step."""


class HoldingAsyncScheduler(_Holding, AsyncScheduler):
    """Scheduler of an engine that schedules a step before the previous one has ended."""


def _call_scheduler(core: Any, name: str, args: list) -> Any:
    """Call a method of the scheduler, as the engine's front end asks."""
    return getattr(core.scheduler, name)(*args)


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Scheduler:
    """Return the extended version of the scheduler that vLLM would choose.

    vLLM calls this function in place of a scheduler class.
    """
    EngineCore.call_scheduler = _call_scheduler  # ty: ignore[missing-attribute]
    is_async = vllm_config.scheduler_config.async_scheduling
    kind = HoldingAsyncScheduler if is_async else HoldingScheduler
    return kind(vllm_config=vllm_config, **kwargs)
