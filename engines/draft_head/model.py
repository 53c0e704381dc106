"""A recurrent draft head: it drafts a response's next tokens from the policy's last hidden state.

    hidden state ─begin─► state ─step─► state ─step─► state
                            ▲             │ output
              embedding of the last token │   ▼
                      ▲                   │ rows of the policy's lm_head ─► draft token ─┐
                      └───────────────────┴──────────────────────────────────────────────┘

The embedding and the `lm_head` are the policy's, so drafts follow its current weights. The head has
no attention, so it has no KV cache and no longest context. It is one module for every depth.

It drafts only tokens of its *draft vocabulary*, as EAGLE-3 does (arXiv 2503.01840, SafeAILab/EAGLE,
`d2t`): those that the policy samples most. The `lm_head` is most of the work of a draft, and few
tokens are most of a text.

Source: the MLP speculator (arXiv 2404.19124, section 3) and ReDrafter (arXiv 2403.09919, section
3.1). Deviations: the embedding and the `lm_head` are shared with the policy, all depths share their
weights, the MLP is gated, and beside it a linear map mixes state and embedding.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MOST_TOKENS = 32_000
"""Largest draft vocabulary, as that of EAGLE-3's heads for Llama 3."""
_EPSILON = 1e-6


class DraftHead(nn.Module):
    """Head for a policy whose hidden states have `hidden_size` elements.

    `token_ids` is the draft vocabulary, int64 [D], ascending. The head has H (2 H + 5 I) + H
    parameters for hidden size H and inner size I: 2.3 million at 576 and 576. A new head repeats
    the policy's last hidden state at every depth.
    """

    token_ids: Tensor

    def __init__(self, hidden_size: int, token_ids: Tensor, inner_size: int | None = None) -> None:
        """`inner_size`: width of the MLP; by default that of the hidden states."""
        super().__init__()
        self.register_buffer("token_ids", token_ids)
        self.hidden_size = hidden_size
        self.inner_size = inner_size or hidden_size
        self.mix = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.up = nn.Linear(2 * hidden_size, 2 * self.inner_size, bias=False)
        self.down = nn.Linear(self.inner_size, hidden_size, bias=False)
        self.scale = nn.Parameter(torch.ones(hidden_size))
        """[H]: factor of each element of a state that becomes the input of the `lm_head`. Training
        begins with the root mean square of all elements of the policy's hidden states."""
        with torch.no_grad():
            self.mix.weight.copy_(torch.eye(hidden_size, 2 * hidden_size))
            self.down.weight.zero_()

    def begin(self, hidden: Tensor) -> Tensor:
        """Return the first states, [N, H].

        `hidden`: [N, H], the inputs of the `lm_head` that gave the last verified tokens.
        """
        return _normed(hidden)

    def step(self, state: Tensor, token_embedding: Tensor) -> Tensor:
        """Return the states after one more token, [N, H].

        `token_embedding`: [N, H], the policy's embedding of the token that follows each state.
        """
        both = torch.cat([state, _normed(token_embedding)], dim=-1)
        gate, up = self.up(both).chunk(2, dim=-1)
        return _normed(self.mix(both) + self.down(nn.functional.silu(gate) * up))

    def output(self, state: Tensor) -> Tensor:
        """Return the inputs of the policy's `lm_head`, [N, H]. Call it after `step`."""
        return state * self.scale


def draft_vocabulary(sampled: Sequence[NDArray[np.int64]], most: int = MOST_TOKENS) -> Tensor:
    """Return the draft vocabulary for a policy that sampled these tokens, int64, ascending: all of
    them, or the `most` that occur most often."""
    found, counts = np.unique(np.concatenate(sampled), return_counts=True)
    chosen = np.argsort(-counts, kind="stable")[:most]
    return torch.from_numpy(np.sort(found[chosen]))


def _normed(x: Tensor) -> Tensor:
    """Divide by the root mean square over the last dimension (RMSNorm without weights)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)).to(x.dtype)
