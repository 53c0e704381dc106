"""Draw the tokens of a step, for the samplers of both of vLLM's model runners.

vLLM's own sampling depends on the drafts, even with a seed. Here the noise of (sample key,
position) selects the token of each row. A draft token is accepted if and only if it equals that
token. So speculation, batching and placement cannot change a sample.

The log-probabilities are of softmax(logits / T) before top-k and top-p, as a trainer without
truncation computes them. At temperature 0 they are of softmax(logits).

Module `cpu` or `gpu` draws, depending on the device. No step waits for a GPU.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from refrain.engines.inference.engine.extra_args import SAMPLE_KEY
from refrain.engines.inference.sampling.step_rows import GREEDY_BELOW, Foresee, Sample, StepRows


class Drawing:
    """Draws tokens on one device."""

    def __init__(self, device: torch.device) -> None:
        # Import only the module of this device, and only after vLLM has started (see `cpu`).
        backend = "cpu" if torch.device(device).type == "cpu" else "gpu"
        self._backend = import_module(f"refrain.engines.inference.sampling.{backend}")
        self._sample: Sample = self._backend.sample
        self._foresee: Foresee = self._backend.foresee
        self._device = device
        self._ranks = torch.zeros(0, dtype=torch.int64, device=device)
        """Placeholder zeros for the token ranks that vLLM's data structure requires."""

    def warm(self, model_config: Any, most_drafts: int) -> None:
        """Compile the kernels in advance, if the device needs that."""
        if hasattr(self._backend, "warm"):
            vocab_size = model_config.get_vocab_size()
            self._backend.warm(vocab_size, model_config.head_dtype, self._device, most_drafts)

    def draw(
        self, logits: Tensor, rows: StepRows, top_k: Tensor | None, top_p: Tensor | None
    ) -> tuple[Tensor, LogprobsTensors]:
        """Return the tokens of the step's requests, as `step_rows.Sample` does, and their
        log-probabilities, one after the other.

        `top_k`, `top_p`: [rows] of each row of the logits, or None.
        """
        drawn_from = _truncated(logits, rows, top_k, top_p)
        tokens, logprobs = self._sample(logits, drawn_from, rows)
        return tokens, self.logprobs_tensors(tokens.flatten(), logprobs.flatten())

    def foresee(
        self, logits: Tensor, rows: StepRows, top_k: Tensor | None, top_p: Tensor | None
    ) -> Tensor:
        """Return the tokens that `draw` returns for rows without drafts, int32 [rows]."""
        return self._foresee(_truncated(logits, rows, top_k, top_p), rows)

    def logprobs_tensors(self, tokens: Tensor, logprobs: Tensor) -> LogprobsTensors:
        if len(self._ranks) < len(tokens):
            self._ranks = self._ranks.new_zeros(len(tokens))
        return LogprobsTensors(
            logprob_token_ids=tokens[:, None],
            logprobs=logprobs[:, None],
            selected_token_ranks=self._ranks[: len(tokens)],
        )


def key_of(params: Any) -> int:
    """Return the sample key of vLLM's `SamplingParams`. Canaries have no key and get 0."""
    return params.extra_args[SAMPLE_KEY] if params.extra_args else 0


def by_row(values: Tensor | None, rows: StepRows, num_rows: int) -> Tensor | None:
    """Return each row's value of a tensor with one value for each request."""
    if values is None or rows.ends is None:
        return values
    counts = rows.ends.diff(prepend=rows.ends.new_zeros(1))
    return values.repeat_interleave(counts, output_size=num_rows)


def _truncated(
    logits: Tensor, rows: StepRows, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    """Return logits with -inf for tokens outside top-k and top-p.

    Return `logits` itself if nothing is truncated.
    """
    if top_k is None and top_p is None:
        return logits
    if (temperatures := by_row(rows.temperatures, rows, len(logits))) is None:
        return logits
    scales = torch.where(temperatures < GREEDY_BELOW, 1.0, 1.0 / temperatures)
    # vLLM's kernel works in place, so pass a new tensor.
    return apply_top_k_top_p(logits.float() * scales[:, None], top_k, top_p)
