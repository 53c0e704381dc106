"""An optimiser step of refrain's trainer on a card: memory, time, and packing that changes
nothing."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.models import config_of, largest, random_model
from tests.gpu.needs import REHEARSAL, needs

BYTES_EACH = 20
"""Bytes of a parameter in training: weight, gradient, two moments, and what AdamW makes on the
way."""
SPARE_BYTES = 12 * 2**30
"""Activations and logits of a micro-batch."""
MICRO_BATCH_TOKENS = 256 if REHEARSAL else 16_384
LENGTHS = (16, 80) if REHEARSAL else (64, 2048)
"""Shortest and longest response."""


@needs("cuda", "transformers", "jaxtyping", seconds=75)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_an_optimiser_step(family: str, device: str, figures: Callable) -> None:
    """Float32 weights, bf16 products, activations computed again; the second step is timed."""
    shape = largest(family, device, BYTES_EACH, SPARE_BYTES)
    policy = _sharded(_policy(shape, device), device)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    sequences = _sequences(config_of(shape).vocab_size, 8 if REHEARSAL else 48)
    head = policy.model.get_output_embeddings()
    before = _beginning(head)
    for _ in range(2):
        _wait(device)
        started_s = time.perf_counter()
        norm = _step(policy, optimizer, sequences)
        seconds = _until_done(device, started_s)
    assert np.isfinite(norm)
    assert norm > 0.0
    assert not torch.equal(before, _beginning(head))
    name, num_tokens = _figure_name(shape), sum(s.num_input_tokens for s in sequences)
    figures(**{f"{name}_step_s": seconds, f"{name}_tokens_per_s": num_tokens / seconds})
    if device == "cuda":
        figures(**{f"{name}_peak_gb": torch.cuda.max_memory_allocated() / 1e9})


@needs("cuda", "transformers", "jaxtyping", seconds=30)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_samples_that_share_a_row_do_not_see_each_other(family: str, device: str) -> None:
    from engines.learn.policy import score_sequences

    policy = _policy(f"{family}-tiny", device)
    sequences = _sequences(512, 12)
    together = score_sequences(policy, sequences, 1024 if REHEARSAL else 16_384, 1.0)
    alone = [score_sequences(policy, [sequence], 16_384, 1.0)[0] for sequence in sequences]
    for packed, expected in zip(together, alone, strict=True):
        assert np.abs(packed - expected).max() < 1e-3
    shifted = [*alone[1:], alone[0]]
    assert not all(
        len(a) == len(b) and np.abs(a - b).max() < 1e-3 for a, b in zip(alone, shifted, strict=True)
    )


def _policy(shape: str, device: str) -> Any:
    from engines.learn.policy import PolicyModel

    torch.cuda.reset_peak_memory_stats() if device == "cuda" else None
    model = random_model(shape, device, torch.float32).requires_grad_(True)
    return PolicyModel(model).train()


def _sharded(policy: Any, device: str) -> Any:
    """As a rank alone has it, computing in bf16."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from engines.learn.sharding import shard

    if not dist.is_initialized():
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    shard(policy, init_device_mesh(device, (1,)), torch.bfloat16)
    return policy


def _sequences(vocab_size: int, num: int) -> list[Any]:
    from engines.learn.packing import TokenSequence

    rng = np.random.default_rng(0)
    lengths = rng.integers(*LENGTHS, size=num)
    return [
        TokenSequence(rng.integers(vocab_size, size=16 + n).astype(np.int32), 16) for n in lengths
    ]


def _step(policy: Any, optimizer: torch.optim.Optimizer, sequences: list) -> float:
    """One update, as `engines.learn.gradient` makes it; the gradient's norm."""
    from engines.learn.losses import clipped_policy_losses
    from engines.learn.packing import pack

    optimizer.zero_grad(set_to_none=True)
    num_tokens = sum(sequence.num_response_tokens for sequence in sequences)
    for batch in pack(sequences, MICRO_BATCH_TOKENS):
        logprobs = policy.score(batch, 1.0).logprobs
        counts = [sequences[sample].num_response_tokens for sample in batch.samples]
        starts = np.cumsum([0, *counts])
        advantages = torch.ones_like(logprobs)
        for i, (start, end) in enumerate(pairwise(starts)):
            advantages[start:end] = (-1.0) ** i
        clip = {"clip_low": 0.2, "clip_high": 0.28}
        losses = clipped_policy_losses(logprobs - logprobs.detach(), advantages, **clip)
        (losses.sum() / num_tokens).backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return norm.full_tensor().item()


def _beginning(head: Any) -> torch.Tensor:
    return head.weight.full_tensor()[:8].detach().clone()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _until_done(device: str, started_s: float) -> float:
    _wait(device)
    return time.perf_counter() - started_s


def _figure_name(shape: str) -> str:
    return "trainer_" + shape.replace("-", "_").replace(".", "_")
