"""Exact sampling: noise that is a pure function of (sample key, absolute position, token id).

The token at absolute position n of a sample is `argmax_v(logits_v / T + gumbel(key, n, v))`
(the Gumbel-max trick: a fair draw from softmax(logits / T)). Nothing else enters: not the draft,
the batch, the row, the engine or the device. So a sample is the same one wherever and however it
is generated.

The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), addressed by counter: the
stream's start is a hash of key and position, the token id is the index into the stream.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_POSITION = 0xD1342543DE82EF95 - 2**64


REJECTED = -1
"""Placeholder of a token that was not emitted; vLLM's own."""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of signed 64-bit integers."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(sample_keys: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise.

    Args:
        sample_keys: int64 [rows], see `schemas.keys.sample_key`.
        positions: int64 [rows], absolute position of the token to be sampled: the number of
            tokens before it, prompt included.
        vocab_size: number of token ids.

    Returns:
        float32 [rows, vocab_size].
    """
    stream = _mix(_mix(sample_keys) + positions * _POSITION)
    token_ids = torch.arange(1, vocab_size + 1, device=sample_keys.device)
    bits = _mix(stream[:, None] + token_ids * _GAMMA)
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_().float()


def perturbed_argmax(logits: Tensor, sample_keys: Tensor, positions: Tensor) -> Tensor:
    """A fair draw from softmax(logits) of every row, the same one for the same key and position.

    Args:
        logits: float32 [rows, vocab], divided by the temperature, -inf where truncated.
        sample_keys, positions: int64 [rows].

    Returns:
        int64 [rows].
    """
    return torch.argmax(logits + gumbel_noise(sample_keys, positions, logits.shape[-1]), dim=-1)


def accept_exact(
    sampled: Tensor, draft_token_ids: Tensor, num_draft_tokens: list[int]
) -> tuple[Tensor, Tensor]:
    """Accept each request's drafts up to its first one that differs from the sampled token.

    Args:
        sampled: int64 [sum(num_draft_tokens) + requests]: the token of every verified row.
        draft_token_ids: [sum(num_draft_tokens)].
        num_draft_tokens: drafts of each request.

    Returns:
        tokens: int64 [requests, max(num_draft_tokens) + 1], `REJECTED` after the
            first sampled token that refutes its draft (or after the bonus token);
        rows: int64 of the same shape, the row of `sampled` that each entry was taken from.
    """
    device = sampled.device
    if not any(num_draft_tokens):
        return sampled[:, None], torch.arange(len(sampled), device=device)[:, None]
    counts = torch.tensor(num_draft_tokens, device=device)[:, None]
    columns = torch.arange(max(num_draft_tokens) + 1, device=device)
    is_row, is_draft = columns <= counts, columns < counts
    nothing = torch.full_like(is_row, REJECTED, dtype=torch.int64)
    tokens = nothing.masked_scatter(is_row, sampled)
    drafts = nothing.masked_scatter(is_draft, draft_token_ids.long())
    rows = torch.arange(len(sampled), device=device)
    rows = torch.zeros_like(nothing).masked_scatter(is_row, rows)
    # A token is emitted when all drafts before it were right; behind a request's bonus token stands
    # nothing.
    right = (tokens == drafts)[:, :-1].cumprod(dim=1).bool()
    return tokens.masked_fill(~pad(right, (1, 0), value=True), REJECTED), rows
