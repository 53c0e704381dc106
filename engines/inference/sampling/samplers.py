"""Exact samplers for vLLM's V1 model runner (vLLM 0.32). `drawing` says what they draw."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from refrain.engines.inference.sampling.drawing import Drawing, by_row, key_of
from refrain.engines.inference.sampling.step_rows import LogitColumns, StepRows


def install(runner: Any) -> None:
    """Replace the samplers of a V1 runner, and compile their kernels."""
    runner.sampler = ExactSampler(runner.sampler, runner)
    if hasattr(runner, "rejection_sampler"):
        runner.rejection_sampler = ExactRejectionSampler(runner.sampler)
    runner.sampler.drawing.warm(runner.model_config, runner.num_spec_tokens)


class ExactSampler(Sampler):
    """Sampler for steps without drafts: one token per request."""

    def __init__(self, replaced: Sampler, runner: Any) -> None:
        super().__init__(replaced.logprobs_mode)
        self.runner = runner
        self.drawing = Drawing(runner.device)
        self._req_ids: list[str] = []
        self._keys: Tensor | None = None
        """int64 [requests]: sample keys of the requests in `_req_ids`."""

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
        cuts = (by_row(cut, rows, len(logits)) for cut in (metadata.top_k, metadata.top_p))
        tokens, logprobs = self.drawing.draw(logits, rows, *cuts)
        return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)

    def foresee(
        self, logits: Tensor, columns: LogitColumns, requests: Tensor, positions: Tensor
    ) -> Tensor:
        """Return the token that each of these requests draws from its row of `logits`, int32
        [rows], with the noise of its own sample.

        `columns`: tokens of the logits. `requests`: int64 [rows], row of each request in the batch.
        `positions`: int64 [rows], position of each request's last token before the drawn one.
        """
        metadata = self.runner.input_batch.sampling_metadata

        def of_rows(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[requests]

        rows = StepRows(
            positions=positions,
            input_rows=torch.arange(len(requests), dtype=torch.int32, device=requests.device),
            after=0,
            keys=self._sample_keys()[requests],
            temperatures=None if metadata.all_greedy else of_rows(metadata.temperature),
            columns=columns,
        )
        cuts = of_rows(metadata.top_k), of_rows(metadata.top_p)
        return self.drawing.foresee(logits, rows, *cuts)

    def gather_logprobs(
        self, logprobs: Tensor, num_logprobs: int, token_ids: Tensor
    ) -> LogprobsTensors:
        """Return the log-probabilities of prompt tokens, for canaries.

        Leave out their ranks, for which vLLM would compile a kernel.
        """
        assert num_logprobs == 0
        chosen = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
        return self.drawing.logprobs_tensors(token_ids.int(), chosen)

    def _sample_keys(self) -> Tensor:
        """Return the sample keys in row order, int64 [requests]."""
        batch, requests = self.runner.input_batch, self.runner.requests
        req_ids = batch.req_ids[: batch.num_reqs]
        if self._keys is None or req_ids != self._req_ids:
            self._req_ids, device = list(req_ids), torch.device(self.runner.device)
            keys = [key_of(requests[req_id].sampling_params) for req_id in req_ids]
            on_host = torch.tensor(keys, dtype=torch.int64, pin_memory=device.type == "cuda")
            self._keys = on_host.to(device, non_blocking=True)
        return self._keys


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
            drafts=self.sampler.runner.input_ids.gpu[metadata.logits_indices],
            width=metadata.max_spec_len + 1,
        )
