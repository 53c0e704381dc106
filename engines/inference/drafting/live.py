"""Live sequences of a draft model: decode them, pause them, roll them back; never resubmit them.

    open(tokens) ─► go_on(ids) ─► one token each ─► go_on(ids) ─► ...    pauses when not in `ids`
                                      └─ set_back(keep, tokens): tokens after `keep` were wrong

vLLM's engine core (vLLM 0.32) runs in this process without its front end. A sequence is a vLLM
request, which `set_back` edits in place: it cuts the tokens in the scheduler and in the runner, and
keeps the valid part of the KV cache. The next step computes the new tokens only. So a round costs
by its new tokens, whatever the context length: nothing is sent, hashed or admitted again. One cost
of the context remains: a paused sequence that returns to the batch has its tokens copied.

The prefix cache holds the tokens that sequences were opened with, which samples of a prompt share.
Drafts never enter the cache, as they may be wrong.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np

from refrain.engines.inference.engine.process import final_params


class CacheFull(Exception):
    """The KV cache is full: paused sequences leave no memory for a step of the others."""


class LiveSequences:
    """The live sequences of one model. Use them only in the thread that created this object."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        """Load the model. Call `prepare_process` before."""
        from vllm import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        args: dict[str, Any] = {
            "distributed_executor_backend": "uni",
            "async_scheduling": False,
            "scheduler_cls": "refrain.engines.inference.drafting.live_scheduler.LiveScheduler",
        }
        config = EngineArgs(**args, **engine_args).create_engine_config()
        self.vllm_config = config
        """vLLM's configuration."""
        self._core: Any = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._core.collective_rpc("install_exact_sampling")
        self._scheduler = self._core.scheduler
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._texts: dict[str, np.ndarray] = {}
        """int32 [max_model_len]: tokens of each sequence. Values after its end are undefined."""
        self._keep_opening_texts()
        self._return_from_arrays()

    @property
    def vocab_size(self) -> int:
        return self.vllm_config.model_config.get_vocab_size()

    @property
    def ending_tokens(self) -> frozenset[int]:
        """End-of-sequence tokens of the model."""
        model = self.vllm_config.model_config
        given = [
            model.hf_text_config.to_dict().get("eos_token_id"),
            model.try_get_generation_config().get("eos_token_id"),
        ]
        ids = [[one] if isinstance(one, int) else one or [] for one in given]
        return frozenset(chain.from_iterable(ids))

    def open(self, id: str, token_ids: Sequence[int], **params: Any) -> None:
        """Open a sequence that continues these tokens. `params`: of vLLM's `SamplingParams`."""
        from vllm.v1.request import Request

        params |= {"ignore_eos": True, "max_tokens": self.vllm_config.model_config.max_model_len}
        request = Request(
            id, list(token_ids), final_params(**params), None,
            block_hasher=self._core.request_block_hasher,
        )  # fmt: skip
        # Do not hash the tokens that follow: drafts stay out of the prefix cache.
        request._block_hasher = None
        self._texts[id] = text = np.zeros(self.vllm_config.model_config.max_model_len, np.int32)
        text[: len(token_ids)] = token_ids
        self._scheduler.add_request(request)

    def close(self, id: str) -> None:
        from vllm.v1.request import RequestStatus

        self._scheduler.wake(id)
        del self._texts[id]
        self._scheduler.finish_requests(id, RequestStatus.FINISHED_ABORTED)

    def set_back(self, id: str, keep: int, token_ids: Sequence[int]) -> None:
        """Keep the first `keep` tokens of a sequence and append `token_ids`.

        `keep` must lie between the sequence's first length (when opened) and its present length.
        """
        request, state = self._scheduler.requests[id], self._runner.requests.get(id)
        assert len(request.prompt_token_ids) <= keep <= request.num_tokens
        end, num_kept = keep + len(token_ids), keep - request.num_prompt_tokens
        self._texts[id][keep:end] = token_ids
        request._all_token_ids[keep:] = token_ids
        if state is None:
            # The runner does not know this request yet: it will take all tokens as its prompt.
            request.prompt_token_ids += token_ids
            request.num_prompt_tokens = end
            return
        request._output_token_ids[num_kept:] = token_ids
        state.output_token_ids[num_kept:] = token_ids
        # Always recompute the last token: the next one is drawn from its logits.
        request.num_computed_tokens = min(request.num_computed_tokens, keep, end - 1)
        batch = self._runner.input_batch
        if (row := batch.req_id_to_index.get(id)) is not None:
            batch.token_ids_cpu[row, keep:end] = token_ids
            batch.is_token_ids[row, keep:end] = True
            batch.num_tokens_no_spec[row] = end

    def go_on(self, ids: Collection[str]) -> dict[str, int]:
        """Run one step of these sequences. Return the token that each has drawn.

        A sequence draws none while its prompt is still being computed, or if the batch is full.
        Raise `CacheFull` if no sequence can run.
        """
        self._scheduler.rest_others(ids)
        _, has_run = self._core.step_fn()
        if not has_run:
            raise CacheFull
        tokens, requests = self._scheduler.drawn, self._scheduler.requests
        for id, token in tokens.items():
            self._texts[id][requests[id].num_tokens - 1] = token
        return tokens

    def shutdown(self) -> None:
        self._core.shutdown()

    def _keep_opening_texts(self) -> None:
        """Let vLLM cache only the blocks of tokens that sequences were opened with."""
        coordinator = self._scheduler.kv_cache_manager.coordinator
        cache, block = coordinator.cache_blocks, self._scheduler.hash_block_size

        def opening(request: Any, num_computed_tokens: int) -> None:
            cache(request, min(num_computed_tokens, block * len(request.block_hashes)))

        coordinator.cache_blocks = opening

    def _return_from_arrays(self) -> None:
        """Let a returning sequence enter the runner's batch from an array.

        vLLM would convert its list of tokens, which takes time for each token.
        """
        batch = self._runner.input_batch
        add = batch.add_request

        def add_row(state: Any) -> int:
            prompt, output = state.prompt_token_ids, state.output_token_ids
            text, num = self._texts[state.req_id], state.num_prompt_tokens
            state.prompt_token_ids = text[:num]
            state.output_token_ids = text[num : num + len(output)]
            try:
                row = add(state)
            finally:
                state.prompt_token_ids, state.output_token_ids = prompt, output
            batch.req_output_token_ids[row] = output
            return row

        batch.add_request = add_row
