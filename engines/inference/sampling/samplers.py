"""Exact samplers in the place of vLLM's `Sampler` and `RejectionSampler` (vLLM 0.32, V1 runner).

vLLM's own sampling depends on the drafts even with a seed. Here every row of logits yields the one
token that the noise of its (sample key, position) selects; a draft token is accepted exactly when
it equals that token. Hence speculation, batching and placement cannot change a sample.

The returned log-probability is of softmax(logits / T), before top-k and top-p (temperature 0: of
softmax(logits)): what a trainer without truncation computes.
"""

from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from engines.inference.sampling.exact import accept_exact, perturbed_argmax

SAMPLE_KEY = "sample_key"
"""Name of the sample key in `SamplingParams.extra_args`."""

_GREEDY_BELOW = 1e-5
_NOISE_ELEMENTS = 2**24
"""Rows x vocabulary handled at once: bounds the noise's memory to about 0.5 GiB."""


def _per_row(values: Tensor | None, row_counts: Tensor | None) -> Tensor | None:
    """One value a request -> one value a row of logits."""
    if values is None or row_counts is None:
        return values
    return values.repeat_interleave(row_counts)


def exact_sample(
    logits: Tensor,
    sample_keys: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The token of every row, and its log-probability.

    Args:
        logits: float [rows, vocab].
        sample_keys, positions: int64 [rows].
        temperature: float [rows]; None when every row is greedy.
        top_k, top_p: [rows]; None when no row is truncated.

    Returns:
        (int64 [rows], float32 [rows]).
    """
    logits = logits.float()
    if temperature is None:
        tokens = logits.argmax(dim=-1)
        return tokens, _logprob_of(tokens, logits)
    greedy = temperature < _GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    # The library's kernel works in place, and the log-probabilities are taken before truncation.
    kept = scaled
    if top_k is not None or top_p is not None:
        kept = apply_top_k_top_p(scaled.clone(), top_k, top_p)
    noisy = perturbed_argmax(kept, sample_keys, positions)
    tokens = torch.where(greedy, logits.argmax(dim=-1), noisy)
    return tokens, _logprob_of(tokens, scaled)


def _logprob_of(tokens: Tensor, logits: Tensor) -> Tensor:
    chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
    return chosen - logits.logsumexp(dim=-1)


def exact_sample_chunked(logits: Tensor, *of_rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """`exact_sample`, in chunks of rows that bound the memory of the noise; `of_rows`: its other
    arguments."""
    size = max(1, _NOISE_ELEMENTS // logits.shape[-1])
    arguments = (repeat(None) if values is None else values.split(size) for values in of_rows)
    chunks = zip(logits.split(size), *arguments, strict=False)
    tokens, logprobs = zip(*(exact_sample(*chunk) for chunk in chunks), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


class ExactSampler(Sampler):
    """Samples one token a request, without drafts."""

    def __init__(self, replaced: Sampler, runner: Any) -> None:
        super().__init__(replaced.logprobs_mode)
        self.runner = runner
        self._req_ids: list[str] = []
        self._keys: Tensor | None = None
        """int64 [requests]: their sample keys."""

    def forward(  # ty: ignore[incompatible-method-override]
        self, logits: Tensor, sampling_metadata: SamplingMetadata, **_: Any
    ) -> SamplerOutput:
        num_requests = logits.shape[0]
        last_rows = self.runner.query_start_loc.gpu[1 : num_requests + 1].long() - 1
        tokens, logprobs = self.sample_rows(logits, last_rows, sampling_metadata, None)
        return SamplerOutput(
            sampled_token_ids=tokens.int()[:, None],
            logprobs_tensors=_logprobs_tensors(tokens, logprobs),
        )

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Log-probabilities of prompt tokens, for canaries; without ranks, for which vLLM compiles
        a kernel."""
        assert num_logprobs == 0
        return _logprobs_tensors(token_ids, logprobs.gather(-1, token_ids[:, None]).squeeze(-1))

    def sample_rows(
        self,
        logits: Tensor,
        input_rows: Tensor,
        metadata: SamplingMetadata,
        row_counts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Sample every row of `logits`; `input_rows` are the batch positions they come from."""
        assert metadata.no_penalties, "penalties depend on the order of acceptance"
        assert not metadata.bad_words_token_ids
        # A row's logits predict the token after the one at `positions`.
        positions = self.runner.positions[input_rows].long() + 1
        temperature = None if metadata.all_greedy else metadata.temperature
        per_request = (self._sample_keys(), temperature, metadata.top_k, metadata.top_p)
        keys, *others = (_per_row(values, row_counts) for values in per_request)
        return exact_sample_chunked(logits, keys, positions, *others)

    def _sample_keys(self) -> Tensor:
        """int64 [requests], in the order of the rows; requests without a key (canaries) get 0."""
        batch = self.runner.input_batch
        req_ids = batch.req_ids[: batch.num_reqs]
        if self._keys is None or req_ids != self._req_ids:
            self._req_ids = list(req_ids)
            keys = [self._key(req_id) for req_id in req_ids]
            self._keys = torch.tensor(keys, dtype=torch.int64).to(self.runner.device)
        return self._keys

    def _key(self, req_id: str) -> int:
        extra = self.runner.requests[req_id].sampling_params.extra_args
        return extra[SAMPLE_KEY] if extra else 0


class ExactRejectionSampler(RejectionSampler):
    """Verifies drafts: a draft is right when it equals the exact sample at its position."""

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
        row_counts = torch.tensor(metadata.num_draft_tokens, device=logits.device) + 1
        sampled, logprobs = self.sampler.sample_rows(
            logits, metadata.logits_indices.long(), sampling_metadata, row_counts
        )
        tokens, rows = accept_exact(sampled, metadata.draft_token_ids, metadata.num_draft_tokens)
        return SamplerOutput(
            sampled_token_ids=tokens.int(),
            logprobs_tensors=_logprobs_tensors(
                tokens.clamp(min=0).flatten(), logprobs[rows].flatten()
            ),
        )


def _logprobs_tensors(tokens: Tensor, logprobs: Tensor) -> LogprobsTensors:
    return LogprobsTensors(
        logprob_token_ids=tokens.int()[:, None],
        logprobs=logprobs[:, None],
        selected_token_ranks=torch.zeros_like(tokens),
    )
