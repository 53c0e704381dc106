"""Fast scheduling of steps that only decode, on top of vLLM's scheduler (vLLM 0.32).

    schedule:  all running requests decode, none can be admitted, blocks suffice
                   yes ─► one pass over the requests         no ─► vLLM
    update:    a request goes on after its new tokens
                   yes ─► append them to it and its report   no ─► vLLM

vLLM checks each request for images, chunks of its prompt, adapters and its place in the queue, and
makes an output object for each token. Most steps of a rollout need none of this. The steps built
here are those that vLLM would build: `tests/inference/test_decode_steps.py` compares them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from refrain.engines.inference.engine.output_buffer import OutputBuffer
from refrain.engines.inference.engine.stopping import StopStrings

_Base = Scheduler if TYPE_CHECKING else object


@dataclass(slots=True)
class Decoding:
    """What ends a request that only generates tokens, and where its tokens go."""

    request: Any
    all_tokens: list[int]
    output_tokens: list[int]
    stop_tokens: frozenset[int]
    stop_strings: StopStrings | None
    with_logprobs: bool
    most_tokens: int
    """Number of tokens at which it ends, with its prompt."""

    @classmethod
    def of(
        cls, request: Any, stop_strings: StopStrings | None, max_model_len: int
    ) -> "Decoding | None":
        """Return None if vLLM must handle each token of this request."""
        params = request.sampling_params
        if (
            params.prompt_logprobs is not None
            or params.repetition_detection is not None
            or request.structured_output_request is not None
            or request.mm_features
            or request.resumable
        ):
            return None
        return cls(
            request=request,
            all_tokens=request._all_token_ids,
            output_tokens=request._output_token_ids,
            stop_tokens=frozenset(params.stop_token_ids or ()) | {params.eos_token_id},
            stop_strings=stop_strings,
            with_logprobs=params.num_logprobs is not None,
            most_tokens=min(request.num_prompt_tokens + request.max_tokens, max_model_len),
        )

    @property
    def decodes(self) -> bool:
        """Whether its next output can be a token that only goes on."""
        request = self.request
        return (
            request.status is RequestStatus.RUNNING
            and not request.num_stale_output_tokens
            # The first output reports what was in the prefix cache.
            and request.prefill_stats is None
        )

    def goes_on(self, tokens: Sequence[int]) -> bool:
        """Return whether the request surely goes on after these tokens."""
        return (
            len(self.all_tokens) + len(tokens) < self.most_tokens
            and self.stop_tokens.isdisjoint(tokens)
            and (self.stop_strings is None or not self.stop_strings.may_end_in(tokens))
        )


class DecodeSteps(_Base):
    """Mixin for vLLM's schedulers. Put it before them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: dict[int, OutputBuffer] = defaultdict(OutputBuffer)
        """Buffered outputs of each front end."""
        config = self.vllm_config
        self._is_async = bool(config.scheduler_config.async_scheduling)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        self._blocks_of = [(one.req_to_blocks, one.block_size) for one in managers]
        self._num_cached = managers[0].num_cached_block
        self._least_block = min(one.block_size for one in managers)
        speculation = config.speculative_config
        self._draft_slots = speculation.max_num_new_slots_for_drafting if speculation else 0
        self._placeholders = [-1] * self.num_spec_tokens
        """Drafts that vLLM expects of each request after an asynchronous step. Read-only."""
        self._can_be_fast = not (
            self.use_pp
            or self.has_mamba_layers
            or self.is_encoder_decoder
            or self.prefix_replay_tokens
            or self.num_sampled_tokens_per_step != 1
            or self.dynamic_sd_lookup is not None
            or self.lora_config is not None
            or self.ec_connector is not None
            or self.aux_output_connector is not None
            or (self._is_async and self.num_spec_tokens and not self.use_v2_model_runner)
        )

    def _decode_step(self) -> SchedulerOutput | None:
        """Return a step of all running requests, or None if vLLM must schedule it.

        The scheduler is unchanged if the result is None.
        """
        if not self._can_be_fast or self._inflight_prefills or self._may_admit():
            return None
        if self._pause_state == PauseState.PAUSED_ALL:
            return None
        if (rows := self._rows()) is None:
            return None
        budget = self.scheduler_config.max_num_batched_tokens - self._draft_slots * len(rows.ids)
        total = sum(rows.news)
        if not total or total > min(budget, self.max_num_scheduled_tokens):
            return None
        if (blocks := self._new_blocks(rows.short, rows.filled)) is None:
            return None
        return self._step_of(rows, total, blocks)

    def _rows(self) -> "_Rows | None":
        """Return the running requests that decode. Return None if one of them needs vLLM."""
        rows, ahead = _Rows([], [], [], [], [], [], [], []), self.num_lookahead_tokens
        (blocks, size), *others = self._blocks_of
        is_sync = not self._is_async
        cached, per_block = self._num_cached, size // self.hash_block_size
        for request in self.running:
            computed, pending = request.num_computed_tokens, request.num_output_placeholders
            if pending and computed + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
                # The step in flight ends it.
                continue
            drafts, id, num = request.spec_token_ids, request.request_id, request.num_tokens
            end = num + len(drafts) + pending
            if not computed < end < self.max_model_len:
                return None
            if request.structured_output_request or request.mm_features:
                return None
            rows.requests.append(request)
            rows.ids.append(id)
            rows.news.append(end - computed)
            rows.computed.append(computed)
            rows.num_output.append(len(request._output_token_ids) + pending)
            if drafts:
                rows.drafted.append(request)
            if is_sync and cached.get(id, 0) * per_block < len(request.block_hashes):
                rows.filled.append((request, num))
            end += ahead
            if end > len(blocks[id]) * size or (
                others and any(end > len(more[id]) * each for more, each in others)
            ):
                rows.short.append((request, end - ahead - computed))
        return rows

    def _may_admit(self) -> bool:
        """Return whether vLLM would try to admit a waiting request."""
        if self.kv_holding_waiting:
            return True
        num_active = len(self.running) + self.num_waiting_for_streaming_input
        return bool(self.waiting) and num_active < self.max_num_active_reqs

    def _new_blocks(
        self, short: Sequence[tuple[Any, int]], filled: Sequence[tuple[Any, int]]
    ) -> dict[str, Any] | None:
        """Allocate blocks and return their ids by request. Return None if they may not suffice.

        See `_Rows` for the arguments. Full blocks enter the prefix cache, as in vLLM.
        """
        manager, ahead = self.kv_cache_manager, self.num_lookahead_tokens
        most = sum(1 + -(-(new + ahead) // self._least_block) for _, new in short)
        if most * len(self._blocks_of) > manager.block_pool.get_num_free_blocks():
            return None
        given = {}
        for request, new in short:
            blocks = manager.allocate_slots(request, new, num_lookahead_tokens=ahead)
            assert blocks is not None, "blocks were counted"
            given[request.request_id] = blocks.get_block_ids(allow_none=True)
        for request, num_tokens in filled:
            manager.cache_blocks(request, num_tokens)
        return given

    def _step_of(self, rows: "_Rows", total: int, blocks: dict[str, Any]) -> SchedulerOutput:
        """Return vLLM's description of the step, and count its tokens as computed."""
        step = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=rows.ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids=self._unknown_tokens(rows),
                new_block_ids=[blocks.get(id) for id in rows.ids],
                num_computed_tokens=rows.computed,
                num_output_tokens=rows.num_output,
            ),
            num_scheduled_tokens=dict(zip(rows.ids, rows.news, strict=True)),
            total_num_scheduled_tokens=total,
            scheduled_spec_decode_tokens={
                one.request_id: one.spec_token_ids for one in rows.drafted
            },
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=self.num_spec_tokens,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        self.current_step += 1
        if self.connector is not None:
            step.kv_connector_metadata = self._build_kv_connector_meta(self.connector, step)
        self._count_scheduled(rows)
        self.finished_req_ids, self.reset_preempted_req_ids = set(), set()
        return step

    def _unknown_tokens(self, rows: "_Rows") -> dict[str, list[int]]:
        """Return all tokens of the requests that were not in the previous step.

        Only vLLM's V1 runner needs them.
        """
        if self.use_v2_model_runner:
            return {}
        known = self.prev_step_scheduled_req_ids
        self.prev_step_scheduled_req_ids = set(rows.ids)
        if known.issuperset(rows.ids):
            return {}
        return {
            one.request_id: one._all_token_ids.copy()
            for one in rows.requests
            if one.request_id not in known
        }

    def _count_scheduled(self, rows: "_Rows") -> None:
        for request, new in zip(rows.requests, rows.news, strict=True):
            request.num_computed_tokens += new
            request.num_in_flight_tokens += new
        if self._is_async:
            self._expect_outputs(rows)
        else:
            for request in rows.drafted:
                request.spec_token_ids = []
        if self.defer_block_free:
            self.sched_step_seq += 1
            for request in rows.requests:
                request.last_sched_seq = self.sched_step_seq

    def _expect_outputs(self, rows: "_Rows") -> None:
        """Count the tokens that a scheduled asynchronous step may return."""
        placeholders = self._placeholders
        for request in rows.requests:
            request.num_output_placeholders += 1 + len(request.spec_token_ids)
            request.spec_token_ids = placeholders
        if self.use_v2_model_runner:
            next_step = self.current_step + 1
            for request in rows.requests:
                request.next_decode_eligible_step = next_step

    def _append_tokens(
        self, step: SchedulerOutput, output: Any, rollouts: dict[str, Decoding]
    ) -> dict[str, int]:
        """Append the tokens of a step to the rollouts that go on, and to their reports.

        Return the scheduled tokens of all other requests, which vLLM must handle.
        """
        kv, drawn = output.kv_connector_output, output.sampled_token_ids
        if not (self._can_be_fast and drawn) or output.num_nans_in_logits:
            return step.num_scheduled_tokens
        if kv is not None and (kv.failed_recving or kv.invalid_block_ids):
            return step.num_scheduled_tokens
        starts, index = _starts(output), output.req_id_to_index
        others, drafts, size = {}, step.scheduled_spec_decode_tokens, self.hash_block_size
        first_rows: dict[int, int] = {}
        for id, num in step.num_scheduled_tokens.items():
            if (rollout := rollouts.get(id)) is None:
                others[id] = num
                continue
            tokens = drawn[row := index[id]]
            if not (tokens and rollout.goes_on(tokens)):
                others[id] = num
                continue
            request = rollout.request
            request.num_in_flight_tokens -= num
            if id in drafts:
                self._count_drafts(request, len(drafts[id]), len(tokens) - 1)
            if self._is_async:
                request.num_output_placeholders -= len(tokens)
            rollout.output_tokens += tokens
            rollout.all_tokens += tokens
            if (num_tokens := len(rollout.all_tokens)) % size < len(tokens):
                request.update_block_hashes()
            # The last token's keys and values are not computed yet.
            if self._is_async and (num_tokens - 1) % size < len(tokens):
                cached = request.num_computed_tokens - request.num_output_placeholders
                self.kv_cache_manager.cache_blocks(request, cached)
            front_end = request.client_index
            buffer = self._buffers[front_end]
            report = buffer.report_of(id)
            report.tokens += tokens
            if (recorded := self.aux_output_connector) is not None:
                chosen: Any = recorded.take_output(request, output.aux_output_connector_output)
                report.experts.append(chosen)
            if rollout.with_logprobs:
                if front_end not in first_rows:
                    first_rows[front_end] = buffer.add_logprobs(output.logprobs)
                start = first_rows[front_end] + (starts[row] if starts else row)
                report.rows += range(start, start + len(tokens))
        return others

    def _count_drafts(self, request: Any, num_drafted: int, num_accepted: int) -> None:
        request.num_computed_tokens -= num_drafted - num_accepted
        if self._is_async:
            request.num_output_placeholders -= num_drafted - num_accepted
        if (metrics := request.spec_decode_metrics) is not None:
            detailed = self.spec_decode_metrics_level == "detailed"
            metrics.observe(
                num_draft_tokens=num_drafted, num_accepted=num_accepted, detailed=detailed
            )


def _starts(output: Any) -> Sequence[int] | None:
    """Return the first row of each request's log-probabilities. None: one row per request."""
    return None if output.logprobs is None else output.logprobs.cu_num_generated_tokens


@dataclass(slots=True)
class _Rows:
    """LogitColumns of a step that decodes."""

    requests: list[Any]
    ids: list[str]
    news: list[int]
    computed: list[int]
    num_output: list[int]
    drafted: list[Any]
    short: list[tuple[Any, int]]
    """Requests that need blocks, and their new tokens."""
    filled: list[tuple[Any, int]]
    """Requests that fill a block in this step, and their tokens. Empty in asynchronous steps."""
