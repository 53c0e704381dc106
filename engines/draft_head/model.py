"""A recurrent draft head: it drafts a response's next tokens from the policy's last hidden state.

    hidden state ─begin─► state ─step─► state ─step─► state
                            ▲             │ output
              embedding of the last token │   ▼
                      ▲                   │ lm_head of the policy ─► draft token ─┐
                      └───────────────────┴───────────────────────────────────────┘

The embedding and the `lm_head` are the policy's, so drafts follow its current weights. The head has
no attention, so it has no KV cache and no longest context. It is one module for every depth.

Source: the MLP speculator (arXiv 2404.19124, section 3) and ReDrafter (arXiv 2403.09919, section
3.1). Deviations: the embedding and the `lm_head` are shared with the policy, all depths share their
weights, the MLP is gated, and beside it a linear map mixes state and embedding.
"""

import torch
from torch import Tensor, nn

_EPSILON = 1e-6


class DraftHead(nn.Module):
    """Head for a policy whose hidden states have `hidden_size` elements.

    It has H (2 H + 5 I) + H parameters for hidden size H and inner size I: 2.3 million at 576 and
    576. A new head repeats the policy's last hidden state at every depth.
    """

    def __init__(self, hidden_size: int, inner_size: int | None = None) -> None:
        """`inner_size`: width of the MLP; by default that of the hidden states."""
        super().__init__()
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


def _normed(x: Tensor) -> Tensor:
    """Divide by the root mean square over the last dimension (RMSNorm without weights)."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)).to(x.dtype)
