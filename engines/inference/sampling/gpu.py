"""Sampling on a GPU, in two kernel launches (`kernels`)."""

import torch
import triton
from torch import Tensor

from refrain.engines.inference.sampling.kernels import accept, draw
from refrain.engines.inference.sampling.noise import perturbed_argmax
from refrain.engines.inference.sampling.step_rows import StepRows

BLOCK = 2048
"""Token ids in one part of the vocabulary."""

MOST_REGISTERS = 128
"""Of a thread of `draw`. With a few more, a multiprocessor would run 3 programs at once, not 4."""

VOCAB_MULTIPLE = 64
"""vLLM pads the rows of its logits to a multiple of this."""


def warm(vocab_size: int, dtype: torch.dtype, device: torch.device, most_drafts: int) -> None:
    """Compile the kernels, for which the first steps would wait seconds otherwise.

    This covers steps without drafts and with up to `most_drafts` drafts per request. It leaves out
    greedy sampling and sampling with top-k or top-p.

    Raise RuntimeError if the kernel draws other tokens on this GPU than its definition.
    """
    _check(vocab_size, dtype, device)
    stride = triton.cdiv(vocab_size, VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    for width in (1, *(2**power for power in range(1, most_drafts.bit_length() + 1))):
        logits = torch.zeros(width, stride, dtype=dtype, device=device)[:, :vocab_size]
        # Slice as vLLM does: `ends[1:]` is not aligned, and Triton compiles for the alignment.
        ends = torch.arange(width + 1, dtype=torch.int32, device=device)
        one = torch.zeros(1, dtype=torch.int64, device=device)
        temperatures = torch.ones(1, device=device)
        positions = torch.zeros(width, dtype=torch.int64, device=device)
        if width == 1:
            rows = StepRows(positions, ends[1:], 1, one, temperatures)
        else:
            drafted = {"ends": ends[:1] + width, "drafts": ends[:-1], "width": width}
            rows = StepRows(positions, ends[:-1], 0, one, temperatures, **drafted)
        sample(logits, logits, rows)


def _check(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compare the tokens of a few rows with those of the definition."""
    stride = triton.cdiv(vocab_size, VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    logits = torch.linspace(-8.0, 8.0, 8 * stride, dtype=dtype, device=device)
    logits = logits.view(stride, 8).T.contiguous()[:, :vocab_size]
    keys = torch.arange(8, dtype=torch.int64, device=device) * 7919
    ends, temperatures = torch.arange(9, dtype=torch.int32, device=device), torch.ones(8).to(device)
    tokens, _ = sample(logits, logits, StepRows(keys, ends[1:], 1, keys, temperatures))
    expected = perturbed_argmax(logits.float(), keys, keys + 1)
    if not torch.equal(tokens[:, 0].long(), expected):
        raise RuntimeError(
            "the sampling kernel draws other tokens than its definition on this device "
            f"({device}): {tokens[:, 0].tolist()}, expected {expected.tolist()}"
        )


def foresee(drawn_from: Tensor, rows: StepRows) -> Tensor:
    """See `step_rows.Foresee`."""
    if rows.columns:
        # The kernel spends little on parts without a logit.
        shape = len(drawn_from), rows.columns.vocab_size
        all_tokens = drawn_from.new_full(shape, float("-inf"))
        drawn_from = all_tokens.index_copy_(1, rows.columns.token_ids, drawn_from)
    return sample(drawn_from, drawn_from, rows)[0][:, 0]


def sample(
    logits: Tensor,
    drawn_from: Tensor,
    rows: StepRows,
    *,
    rows_at_once: int = 1,
    block: int = BLOCK,
    requests_at_once: int = 1,
) -> tuple[Tensor, Tensor]:
    """Draw the tokens of a step; see `step_rows.Sample`.

    `rows_at_once` and `requests_at_once` (per Triton program) and `block` (token ids per part)
    change the speed only, never a token.
    """
    parts, part_tokens = _draw(logits, drawn_from, rows, rows_at_once, block)
    num_requests, num_parts = len(rows.keys), part_tokens.shape[1]
    tokens = part_tokens.new_empty((num_requests, rows.width))
    logprobs = parts.new_empty((num_requests, rows.width))
    accept[(triton.cdiv(num_requests, requests_at_once),)](
        parts,
        part_tokens,
        part_tokens.numel(),
        num_parts,
        rows.ends,
        num_requests,
        rows.drafts,
        tokens,
        logprobs,
        rows.width,
        RAGGED=rows.ends is not None,
        REQUESTS=requests_at_once,
        WIDTH=triton.next_power_of_2(rows.width),
        PARTS=triton.next_power_of_2(num_parts),
    )
    return tokens, logprobs


def _draw(
    logits: Tensor, drawn_from: Tensor, rows: StepRows, rows_at_once: int, block: int
) -> tuple[Tensor, Tensor]:
    """Return the results of kernel `draw`: float32 [4, rows, parts], and int32 [rows, parts] of
    the best tokens."""
    assert logits.stride() == drawn_from.stride()
    assert logits.stride(1) == 1
    (num_rows, vocab_size), num_requests = logits.shape, len(rows.keys)
    num_parts = triton.cdiv(vocab_size, block)
    parts = logits.new_empty((4, num_rows, num_parts), dtype=torch.float32)
    part_tokens = logits.new_empty((num_rows, num_parts), dtype=torch.int32)
    draw[(triton.cdiv(num_rows, rows_at_once), num_parts)](
        logits,
        drawn_from,
        logits.stride(0),
        num_rows,
        vocab_size,
        rows.input_rows,
        rows.after,
        rows.positions,
        rows.ends,
        num_requests,
        num_requests.bit_length(),
        rows.keys,
        rows.temperatures,
        parts,
        part_tokens,
        part_tokens.numel(),
        RAGGED=rows.ends is not None,
        GREEDY=rows.temperatures is None,
        TRUNCATED=drawn_from is not logits,
        ROWS=rows_at_once,
        BLOCK=block,
        enable_fp_fusion=False,
        maxnreg=MOST_REGISTERS,
    )
    return parts, part_tokens
