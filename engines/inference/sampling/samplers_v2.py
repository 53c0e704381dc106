"""Exact samplers for vLLM's V2 model runner (vLLM 0.32). `drawing` says what they draw.

This runner keeps the state of a request in a slot on the device. A slot's sample key lies beside
vLLM's sampling parameters there.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler, gather_draft_sampled

from refrain.engines.inference.sampling.drawing import Drawing, key_of
from refrain.engines.inference.sampling.step_rows import (
    GREEDY_BELOW,
    REJECTED,
    LogitColumns,
    StepRows,
)


def install(runner: Any) -> None:
    """Replace the samplers of a V2 runner, and compile their kernels."""
    runner.sampler = ExactSamplerV2(runner.sampler, runner.device)
    if runner.rejection_sampler is not None:
        runner.rejection_sampler = ExactRejectionSamplerV2(runner.sampler)
    runner.sampler.drawing.warm(runner.model_config, runner.num_speculative_steps)


class ExactSamplerV2(Sampler):
    """Sampler for steps without drafts: one token per request."""

    def __init__(self, replaced: Sampler, device: torch.device) -> None:
        vars(self).update(vars(replaced))
        self.drawing = Drawing(device)
        self._keys = UvaBackedTensor(len(self.needs_logits_processing), dtype=torch.int64)
        """int64 [slots]: sample keys."""
        self._has_new = True

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        given = sampling_params
        penalties = given.presence_penalty, given.frequency_penalty, given.repetition_penalty
        assert penalties == (0.0, 0.0, 1.0), "penalties depend on the order of acceptance"
        assert not given.bad_words
        super().add_request(req_idx, sampling_params)
        self._keys.np[req_idx] = key_of(sampling_params)
        self._has_new = True

    def apply_staged_writes(self) -> None:
        """Copy the sampling parameters of all slots to the device, if a request is new.

        vLLM does it in each step. On an H200 that was a tenth of the thread's time.
        """
        if not self._has_new:
            return
        self._has_new = False
        super().apply_staged_writes()
        self._keys.copy_to_uva()

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        tokens, logprobs = self.draw(logits, input_batch)
        num_sampled = input_batch.seq_lens.new_ones(input_batch.num_reqs)
        return self.output(input_batch, tokens, num_sampled, logprobs)

    def draw(
        self, logits: Tensor, batch: InputBatch, **of_drafts: Any
    ) -> tuple[Tensor, LogprobsTensors]:
        """Draw the tokens of a step. `of_drafts`: the fields of `StepRows` for drafts."""
        states, slots = self.sampling_states, batch.idx_mapping
        all_greedy = (states.temperature.np[batch.idx_mapping_np] < GREEDY_BELOW).all()
        rows = StepRows(
            positions=batch.positions,
            input_rows=batch.logits_indices,
            after=0,
            keys=self._keys.gpu[slots],
            temperatures=None if all_greedy else states.temperature.gpu[slots],
            **of_drafts,
        )
        cuts = states.get_top_k_top_p(batch.expanded_idx_mapping, batch.idx_mapping_np)
        return self.drawing.draw(logits, rows, *cuts)

    def foresee(
        self, logits: Tensor, columns: LogitColumns, batch: InputBatch, positions: Tensor
    ) -> Tensor:
        """Return the token that each request of the batch draws from its row of `logits`, int32
        [requests], with the noise of its own sample.

        `columns`: tokens of the logits. `positions`: int64 [requests], position of each request's
        last token before the drawn one.
        """
        states, slots = self.sampling_states, batch.idx_mapping
        rows = StepRows(
            positions=positions,
            input_rows=torch.arange(len(slots), dtype=torch.int32, device=slots.device),
            after=0,
            keys=self._keys.gpu[slots],
            temperatures=states.temperature.gpu[slots],
            columns=columns,
        )
        cuts = states.get_top_k_top_p(slots, batch.idx_mapping_np)
        return self.drawing.foresee(logits, rows, *cuts)

    def output(
        self, batch: InputBatch, tokens: Tensor, num_sampled: Tensor, logprobs: LogprobsTensors
    ) -> SamplerOutput:
        """Return the step's output. Requests whose prefill goes on have no token.

        `num_sampled`: int32 [requests], tokens that each request emits if its prefill has ended.
        """
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_sampled,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
            sampling_mask_tensors=None,
        )


class ExactRejectionSamplerV2(RejectionSampler):
    """Sampler for steps with drafts: accept a draft token if it equals the exact sample there."""

    sampler: ExactSamplerV2
    enable_adaptive_verification = False

    def __init__(self, sampler: ExactSamplerV2) -> None:
        self.sampler = sampler

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        del draft_logits
        assert invalid_drafts is None, "structured outputs are not supported"
        assert input_batch.num_draft_tokens_per_req is not None
        # Drafts that stand in for prompt tokens are -1 here.
        drafts, _ = gather_draft_sampled(
            input_batch.input_ids,
            input_batch.positions,
            input_batch.logits_indices,
            input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos,
            self.sampler.req_states.prefill_len.gpu,
        )
        width = int(input_batch.num_draft_tokens_per_req.max()) + 1
        ends = input_batch.cu_num_logits[1:]
        tokens, logprobs = self.sampler.draw(
            logits, input_batch, ends=ends, drafts=drafts, width=width
        )
        num_sampled = (tokens != REJECTED).sum(dim=1, dtype=torch.int32)
        starts = np.arange(0, tokens.numel() + 1, width).tolist()
        logprobs = logprobs._replace(cu_num_generated_tokens=starts)
        return self.sampler.output(input_batch, tokens, num_sampled, logprobs)
