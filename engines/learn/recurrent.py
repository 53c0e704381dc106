"""Tell recurrent layers where the samples of a row begin.

Linear attention and convolutions run on from token to token. Kernels of flash-linear-attention and
causal-conv1d start anew at given bounds. The torch versions in transformers ignore the bounds, so
without these packages each sample needs a row of its own: `engines.learn.sample_isolation` finds
that out on the model itself.
"""

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PretrainedConfig

RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers of transformers that carry a state, or the last tokens, from token to token."""

RECURRENT_BOUNDS = ("cu_seq_lens_q", "seq_idx")
"""Arguments by which transformers passes the samples' bounds to kernels: those of
flash-linear-attention, and of causal-conv1d."""


def has_recurrent_layers(config: PretrainedConfig) -> bool:
    """Return whether a model has layers that run on from token to token beside their attention."""
    return not RECURRENT.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def recurrent_bounds(bounds: Int[Tensor, "samples+1"], num_tokens: int) -> dict[str, Tensor]:
    """Return the arguments RECURRENT_BOUNDS.

    `bounds`: as in `SampleBounds`. `num_tokens`: tokens of the row.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=bounds.device)
    sample = torch.bucketize(tokens, bounds[1:], right=True, out_int32=True)
    return dict(zip(RECURRENT_BOUNDS, (bounds, sample[None]), strict=True))
