"""A copy of some rows of the policy's `lm_head` in vLLM, for drafts of few tokens (vLLM 0.32)."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.logits_processor import LogitsProcessor


class OutputLayer(NamedTuple):
    """Rows of the `lm_head`, and what the policy does to its logits."""

    weight: Tensor
    """[D, hidden size]."""
    bias: Tensor | None
    """[D]."""
    processor: LogitsProcessor

    @classmethod
    def of(cls, policy: Any, token_ids: Tensor, hidden: Tensor) -> "OutputLayer":
        """Copy the rows of these tokens. All ranks call this alike.

        `token_ids`: int64 [D]. `hidden`: [hidden size], any input of the `lm_head`. Raise
        ValueError if the `lm_head` is quantised.
        """
        processor, layer, bias = _called_by(policy, hidden)
        if not layer.weight.is_floating_point() or layer.weight.shape[-1] != len(hidden):
            raise ValueError(
                f"the lm_head of this model is quantised (to {layer.weight.dtype}), and a draft "
                "head needs its rows: remove specactor.head"
            )

        def rows(shard: Tensor) -> Tensor:
            first = layer.shard_indices.org_vocab_start_index
            own = (token_ids >= first) & (token_ids < layer.shard_indices.org_vocab_end_index)
            found = torch.zeros(len(token_ids), *shard.shape[1:]).to(shard)
            found[own] = shard[token_ids[own] - first]
            return tensor_model_parallel_all_reduce(found)

        return cls(rows(layer.weight), None if bias is None else rows(bias), processor)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of these rows, [N, D]. `hidden`: [N, hidden size]."""
        logits = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        if (cap := self.processor.soft_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits * self.processor.scale if self.processor.scale != 1.0 else logits


def _called_by(policy: Any, hidden: Tensor) -> tuple[Any, Any, Tensor | None]:
    """Return the logits processor that a model calls, with the `lm_head` and the bias it gives to
    it. Models differ in where they keep them."""
    calls: list[tuple[Any, Any, Tensor | None]] = []

    def noting(processor: nn.Module, args: Any, kwargs: Any) -> None:
        layer, _, bias, *_ = [*args, kwargs.get("embedding_bias")]
        calls.append((processor, layer, bias))

    processors = [one for one in policy.modules() if isinstance(one, LogitsProcessor)]
    hooks = [one.register_forward_pre_hook(noting, with_kwargs=True) for one in processors]
    try:
        policy.compute_logits(hidden[None])
    finally:
        for hook in hooks:
            hook.remove()
    (found,) = calls
    return found
