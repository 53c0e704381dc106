"""Exact samplers that replace vLLM's `Sampler` and `RejectionSampler` (vLLM 0.32, V1 runner).

vLLM's own sampling depends on the drafts, even with a seed. Here the noise of (sample key,
position) selects the token of each row. A draft token is accepted if and only if it equals that
token. So speculation, batching and placement cannot change a sample.

The returned log-probabilities are of softmax(logits / T) before top-k and top-p, as a trainer
without truncation computes them. At temperature 0 they are of softmax(logits).

Module `cpu` or `gpu` draws, depending on the device. No step waits for a GPU.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from engines.inference.sampling.step_rows import GREEDY_BELOW, Sample, StepRows

SAMPLE_KEY = "sample_key"
"""Key of the sample key in `SamplingParams.extra_args`."""


class ExactSampler(Sampler):
    """Sampler for steps without drafts: one token per request."""

    def __init__(self, replaced: Sampler, runner: Any) -> None:
        super().__init__(replaced.logprobs_mode)
        self.runner = runner
        # Import only the module of this device, and only after vLLM has started (see `cpu`).
        backend = "cpu" if torch.device(runner.device).type == "cpu" else "gpu"
        self._backend = import_module(f"engines.inference.sampling.{backend}")
        self._sample: Sample = self._backend.sample
        self._req_ids: list[str] = []
        self._keys: Tensor | None = None
        """int64 [requests]: sample keys of the requests in `_req_ids`."""
        self._ranks = torch.zeros(0, dtype=torch.int64, device=runner.device)
        """Placeholder zeros for the token ranks that vLLM's data structure requires."""

    def warm(self) -> None:
        """Compile the kernels in advance, if the device needs that."""
        if hasattr(self._backend, "warm"):
            model, drafts = self.runner.model_config, self.runner.num_spec_tokens
            vocab_size, device = model.get_vocab_size(), self.runner.device
            self._backend.warm(vocab_size, model.head_dtype, device, drafts)

    def forward(  # ty: ignore[incompatible-method-override]
        self, logits: Tensor, sampling_metadata: SamplingMetadata, **_: Any
    ) -> SamplerOutput:
        ends = self.runner.query_start_loc.gpu[1 : len(logits) + 1]
        return self.draw(logits, sampling_metadata, input_rows=ends, after=1)

    def draw(self, logits: Tensor, metadata: SamplingMetadata, **of_rows: Any) -> SamplerOutput:
        """Draw the tokens of a step. `of_rows`: the fields of `StepRows` that describe its rows."""
        assert metadata.no_penalties, "penalties depend on the order of acceptance"
        assert not metadata.bad_words_token_ids
        rows = StepRows(
            positions=self.runner.positions,
            keys=self._sample_keys(),
            temperatures=None if metadata.all_greedy else metadata.temperature,
            **of_rows,
        )
        drawn_from = _truncated(logits, rows, metadata.top_k, metadata.top_p)
        tokens, logprobs = self._sample(logits, drawn_from, rows)
        return SamplerOutput(
            sampled_token_ids=tokens,
            logprobs_tensors=self._logprobs_tensors(tokens.flatten(), logprobs.flatten()),
        )

    def gather_logprobs(
        self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor
    ) -> LogprobsTensors:
        """Return the log-probabilities of prompt tokens, for canaries.

        Leave out their ranks, for which vLLM would compile a kernel.
        """
        assert num_logprobs == 0
        chosen = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
        return self._logprobs_tensors(token_ids.int(), chosen)

    def _logprobs_tensors(self, tokens: Tensor, logprobs: Tensor) -> LogprobsTensors:
        if len(self._ranks) < len(tokens):
            self._ranks = self._ranks.new_zeros(len(tokens))
        return LogprobsTensors(
            logprob_token_ids=tokens[:, None],
            logprobs=logprobs[:, None],
            selected_token_ranks=self._ranks[: len(tokens)],
        )

    def _sample_keys(self) -> Tensor:
        """Return the sample keys in row order, int64 [requests]. Canaries have no key and get 0."""
        batch = self.runner.input_batch
        req_ids = batch.req_ids[: batch.num_reqs]
        if self._keys is None or req_ids != self._req_ids:
            self._req_ids = list(req_ids)
            keys = [self._key(req_id) for req_id in req_ids]
            on_host = torch.tensor(keys, dtype=torch.int64, pin_memory=self._ranks.is_cuda)
            self._keys = on_host.to(self.runner.device, non_blocking=True)
        return self._keys

    def _key(self, req_id: str) -> int:
        extra = self.runner.requests[req_id].sampling_params.extra_args
        return extra[SAMPLE_KEY] if extra else 0


def _truncated(
    logits: Tensor, rows: StepRows, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    """Return logits with -inf for tokens outside top-k and top-p.

    Return `logits` itself if nothing is truncated.
    """
    temperatures = rows.temperatures
    if temperatures is None or (top_k is None and top_p is None):
        return logits
    scales = torch.where(temperatures < GREEDY_BELOW, 1.0, 1.0 / temperatures)
    if rows.ends is not None:
        counts = rows.ends.diff(prepend=rows.ends.new_zeros(1))
        scales = scales.repeat_interleave(counts, output_size=len(logits))
        top_k, top_p = (
            None if values is None else values.repeat_interleave(counts, output_size=len(logits))
            for values in (top_k, top_p)
        )
    # vLLM's kernel works in place, so pass a new tensor.
    return apply_top_k_top_p(logits.float() * scales[:, None], top_k, top_p)


class ExactRejectionSampler(RejectionSampler):
    """Sampler for steps with drafts: accept a draft token if it equals the exact sample there."""

    sampler: ExactSampler

    def __init__(self, sampler: ExactSampler) -> None:
        torch.nn.Module.__init__(self)
        self.sampler = sampler

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        del draft_probs
        return self.sampler.draw(
            logits,
            sampling_metadata,
            input_rows=metadata.logits_indices,
            after=0,
            ends=metadata.cu_num_sampled_tokens,
            drafts=metadata.draft_token_ids,
            width=metadata.max_spec_len + 1,
        )
