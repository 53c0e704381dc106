"""Live sequences of a draft model: each goes on, rests, or is set back, and is never sent again.

    open(text) ─► go_on(ids) ─► one token each ─► go_on(ids) ─► ...      rests when it is not asked
                                    └─ set_back(keep, tokens): what is behind `keep` was wrong

vLLM's engine core (vLLM 0.32) runs in this process, without its front end, so a sequence is vLLM's
own request, and is set back where it lies: its tokens are cut in scheduler and runner, its keys and
values stay as far as they are right, and the next step computes what is new. A round costs by its
new tokens, whatever the context: nothing is sent, hashed or admitted again. What remains of the
context are copies of memory, where a sequence that has rested returns to the batch.

The prefix cache has the texts that sequences began with, which samples of a prompt share; drafts
never enter it, as they may be wrong.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import numpy as np

from engines.inference.engine.process import final_params


class CacheFull(Exception):
    """Keys and values of the sequences that rest leave no memory for a step of the others."""


class LiveSequences:
    """Those of one model, in the process and the thread that made them."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        """Loads the model. `prepare_process` has been called."""
        from vllm import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        args: dict[str, Any] = {
            "distributed_executor_backend": "uni",
            "async_scheduling": False,
            "scheduler_cls": "engines.inference.drafting.live_scheduler.LiveScheduler",
        }
        config = EngineArgs(**args, **engine_args).create_engine_config()
        self.vllm_config = config
        """vLLM's configuration."""
        self._core: Any = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._core.collective_rpc("install_exact_sampling")
        self._scheduler = self._core.scheduler
        self._runner = self._core.model_executor.driver_worker.worker.model_runner
        self._texts: dict[str, np.ndarray] = {}
        """int32 [max_model_len]: tokens of each sequence, and behind them whatever was there."""
        self._keep_opening_texts()
        self._return_from_arrays()

    @property
    def vocab_size(self) -> int:
        return self.vllm_config.model_config.get_vocab_size()

    @property
    def ending_tokens(self) -> frozenset[int]:
        """Tokens that end a text."""
        model = self.vllm_config.model_config
        given = [
            model.hf_text_config.to_dict().get("eos_token_id"),
            model.try_get_generation_config().get("eos_token_id"),
        ]
        ids = [[one] if isinstance(one, int) else one or [] for one in given]
        return frozenset(chain.from_iterable(ids))

    def open(self, id: str, token_ids: Sequence[int], **params: Any) -> None:
        """Begin after this text; `params`: vLLM's `SamplingParams`."""
        from vllm.v1.request import Request

        params |= {"ignore_eos": True, "max_tokens": self.vllm_config.model_config.max_model_len}
        request = Request(
            id, list(token_ids), final_params(**params), None,
            block_hasher=self._core.request_block_hasher,
        )  # fmt: skip
        # What follows is not hashed.
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
        """Cut a sequence down to `keep` tokens, and put these behind them. `keep` is no less than
        it was opened with, and no more than it has."""
        request, state = self._scheduler.requests[id], self._runner.requests.get(id)
        assert len(request.prompt_token_ids) <= keep <= request.num_tokens
        end, num_kept = keep + len(token_ids), keep - request.num_prompt_tokens
        self._texts[id][keep:end] = token_ids
        request._all_token_ids[keep:] = token_ids
        if state is None:
            # The runner, which has yet to hear of it, takes all it has so far for its prompt.
            request.prompt_token_ids += token_ids
            request.num_prompt_tokens = end
            return
        request._output_token_ids[num_kept:] = token_ids
        state.output_token_ids[num_kept:] = token_ids
        # The last one is computed in any case: what comes next follows from it.
        request.num_computed_tokens = min(request.num_computed_tokens, keep, end - 1)
        batch = self._runner.input_batch
        if (row := batch.req_id_to_index.get(id)) is not None:
            batch.token_ids_cpu[row, keep:end] = token_ids
            batch.is_token_ids[row, keep:end] = True
            batch.num_tokens_no_spec[row] = end

    def go_on(self, ids: Collection[str]) -> dict[str, int]:
        """Take a step with these sequences; the token that each has drawn. One whose text is not
        computed yet, or that finds no room in the batch, draws none. Raises `CacheFull` when none
        finds any."""
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
        """Cache blocks of the texts that sequences began with, and no others."""
        coordinator = self._scheduler.kv_cache_manager.coordinator
        cache, block = coordinator.cache_blocks, self._scheduler.hash_block_size

        def opening(request: Any, num_computed_tokens: int) -> None:
            cache(request, min(num_computed_tokens, block * len(request.block_hashes)))

        coordinator.cache_blocks = opening

    def _return_from_arrays(self) -> None:
        """Have the runner's batch take the tokens of a sequence that returns from an array: of
        lists it reads each."""
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
