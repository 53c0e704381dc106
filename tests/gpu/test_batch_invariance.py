"""How many tokens flip in bf16 when the batch changes, or when drafts are verified.

The noise depends only on (sample, position, token). So a token flips only where rounding changes
the order of two nearly equal candidates.

The tests compare the same texts position by position. They count flips per 10^6 tokens, of sampled
tokens and of the most likely ones (`greedy`). `test_engines_gpu` counts flips in an engine's steps.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.models import random_model
from tests.gpu.needs import REHEARSAL, needs

SHAPE = "qwen3-tiny" if REHEARSAL else "qwen3-0.6b"
PREFIX_TOKENS, TOKENS = (4, 8) if REHEARSAL else (64, 136)
"""Positions of a text: the given prefix, and those where a token is sampled."""
MAX_BATCH = 4 if REHEARSAL else 2048
CACHE_SHARE = 0.35
"""Share of the free memory to use for keys and values."""
SMALL_BATCHES = (1,) if REHEARSAL else (16, 64)
DRAFTS = (1, 3) if REHEARSAL else (1, 3, 7, 15)
"""Draft tokens to verify in one pass."""
WANTED = 30 if REHEARSAL else 1_000_000
"""Positions to sample at. Fewer if the time runs out."""
TIME_S = {torch.bfloat16: 20.0, torch.float32: 5.0}
CONTROL_SHARE = 4
"""Repeat one in this many positions in the same batch and in small ones."""


@dataclass
class Flips:
    """Number of compared positions, and of those with another token."""

    positions: int = 0
    sampled: int = 0
    greedy: int = 0

    def add(self, tokens: Tensor, expected: Tensor) -> None:
        """Compare tokens of shape [2 (sampled, greedy), rows, positions]."""
        self.positions += tokens[0].numel()
        self.sampled += int((tokens[0] != expected[0]).sum())
        self.greedy += int((tokens[1] != expected[1]).sum())


@needs("cuda", "triton", "transformers", seconds=75)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_flips_by_batch_and_by_draft_length(
    dtype: torch.dtype, device: str, figures: Callable
) -> None:
    """Controls: float32 gives almost no flips, and the same batch again gives none."""
    model = random_model(SHAPE, device, dtype)
    num_texts = _num_texts(model, device)
    flips: defaultdict[str, Flips] = defaultdict(Flips)
    deadline = time.monotonic() + TIME_S[dtype]
    for lap in range(1 + WANTED // (num_texts * TOKENS)):
        if lap and time.monotonic() > deadline:
            break
        ids = _texts(model, num_texts, lap).to(device)
        expected = _drawn(model, ids, 1)
        assert (expected[0] == ids[:, PREFIX_TOKENS:]).float().mean() < 0.5, (
            "the model repeats its input"
        )
        few = TOKENS // CONTROL_SHARE
        for batch in () if lap else (num_texts, *SMALL_BATCHES):
            tokens = _drawn(model, ids[:batch, : PREFIX_TOKENS + few], 1)
            name = "same" if batch == num_texts else f"batch_{batch}"
            flips[name].add(tokens, expected[:, :batch, :few])
        for drafts in DRAFTS:
            flips[f"draft_{drafts}"].add(_drawn(model, ids, drafts + 1), expected)
    assert flips["same"].sampled == flips["same"].greedy == 0
    for name, count in flips.items():
        _tell(figures, f"flips_{'bf16' if dtype == torch.bfloat16 else 'fp32'}_{name}", count)
        if dtype == torch.float32:
            assert count.sampled <= 1e-3 * count.positions + 1


def _tell(figures: Callable, name: str, count: Flips) -> None:
    figures(**{f"{name}_per_million": 1e6 * count.sampled / count.positions})
    figures(**{f"{name}_greedy_per_million": 1e6 * count.greedy / count.positions})
    figures(**{f"{name}_positions": count.positions})


def _num_texts(model: Any, device: str) -> int:
    if device == "cpu":
        return MAX_BATCH
    config, free_bytes = model.config, torch.cuda.mem_get_info()[0]
    token_bytes = 2 * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    text_bytes = config.num_hidden_layers * token_bytes * (PREFIX_TOKENS + TOKENS)
    return min(MAX_BATCH, int(CACHE_SHARE * free_bytes) // text_bytes)


def _texts(model: Any, num_texts: int, lap: int) -> Tensor:
    random = torch.Generator().manual_seed(lap)
    shape = (num_texts, PREFIX_TOKENS + TOKENS)
    return torch.randint(model.config.vocab_size, shape, generator=random)


@torch.no_grad()
def _drawn(model: Any, ids: Tensor, rows: int) -> Tensor:
    """Return the sampled and the most likely tokens after the prefix, int32 [2, texts, positions].

    Each pass computes `rows` positions of each text, with a KV cache of the earlier ones.
    """
    past, tokens = None, []
    starts = [0, *range(PREFIX_TOKENS, ids.shape[1], rows)]
    for start, end in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
        kept = end - start if start else 1
        output = model(ids[:, start:end], past_key_values=past, use_cache=True, logits_to_keep=kept)
        past = output.past_key_values
        if start:
            tokens.append(_sampled(output.logits, start))
    return torch.cat(tokens, dim=2)


def _sampled(logits: Tensor, start: int) -> Tensor:
    """Sample with refrain's noise. The key is the text's index in the batch."""
    from refrain.engines.inference.sampling import gpu
    from refrain.engines.inference.sampling.step_rows import StepRows

    num_texts, num_rows, _ = logits.shape
    flat = logits.flatten(0, 1)
    keys = torch.arange(num_texts, device=flat.device).repeat_interleave(num_rows)
    positions = start + torch.arange(num_rows, device=flat.device).repeat(num_texts)
    each = torch.arange(len(flat), device=flat.device)
    tokens = []
    for temperatures in (torch.ones(len(flat), device=flat.device), None):
        rows = StepRows(positions, each, 0, keys, temperatures)
        tokens.append(gpu.sample(flat, flat, rows)[0].view(num_texts, num_rows))
    return torch.stack(tokens)
