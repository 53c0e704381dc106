"""Peak memory of a trainer rank without a GPU. The trainer's own model, sharded over fake ranks,
computes with tensors that have a size and no content. FSDP2's memory tracker adds up the live ones.

The bench makes two optimiser steps of two micro-batches each and tracks the second. A run is in
that state from its second step on: AdamW's moments exist, and so do gradients during the second
micro-batch. The attention is that of the CUDA path. Its kernel frees all temporary memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from refrain.engines.learn.attention import by_bounds, rows_of
from refrain.engines.learn.context import ContextGroup
from refrain.engines.learn.loading import Loading, prepared
from refrain.engines.learn.packing import MicroBatch, TokenSequence, pack
from refrain.engines.learn.policy import PolicyModel
from refrain.engines.learn.row_mask import RowMask, causal_mask
from refrain.engines.learn.sharding import shard

BY_BOUNDS = "refrain_by_bounds"
MICRO_BATCHES = 2


def track_peak(
    model: dict[str, Any],
    num_ranks: int,
    num_tokens: tuple[int, int],
    *,
    gradient_checkpointing: bool = True,
    kept_layers: int = 0,
    context_parallel: int = 1,
) -> dict[str, float]:
    """Return the bytes at the peak by purpose, and their sum as `Total`.

    `model`: content of a `config.json`; `num_tokens`: of the prompt and of the response of the one
    sample of a micro-batch, which `context_parallel` ranks share.
    """
    loading = Loading(
        torch.device("cpu"), gradient_checkpointing=gradient_checkpointing, kept_layers=kept_layers
    )
    policy = policy_of(model, loading)
    batch = _batch(*num_tokens)
    with _fake_ranks(num_ranks) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        shard(policy, mesh, torch.bfloat16)
        policy.to_empty(device="cpu")
        policy.context = ContextGroup.of(context_parallel, timeout_s=60.0)
        optimizer = AdamW(policy.parameters(), fused=True)
        # The first step allocates the moments, and caches that DTensor fills to infer shapes.
        _step(policy, optimizer, batch, None)
        tracker = FSDPMemTracker(policy, optimizer)
        tracker.track_external(policy, optimizer)
        with tracker:
            _step(policy, optimizer, batch, tracker)
        (peak,) = tracker.get_tracker_snapshot("peak").values()
    return {str(getattr(kind, "value", kind)): float(num) for kind, num in peak.items()}


def policy_of(
    model: dict[str, Any],
    loading: Loading,
    attention: Callable[..., tuple[Tensor, None]] | None = None,
) -> PolicyModel:
    """Return a policy on the meta device, with the attention of the CUDA path or another one.
    `model`: content of a `config.json`."""
    AttentionInterface.register(BY_BOUNDS, attention or flash_attention)
    AttentionMaskInterface.register(BY_BOUNDS, causal_mask)
    config = AutoConfig.for_model(**model)
    with torch.device("meta"):
        made: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=BY_BOUNDS
        )
    return prepared(made, loading)


def flash_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    *,
    scaling: float,
    rows: Callable[..., list[Tensor]] = rows_of,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention as the trainer does on CUDA, on any device. `rows`: makes rows of tokens of
    query, key and value."""
    del module
    made, split = rows(query, key, value), mask.segments.split
    if split is None:
        return by_bounds(made, mask, scaling)[None], None
    return split.to_tokens(by_bounds(split.to_heads(made), mask, scaling))[None], None


def _batch(prompt_tokens: int, response_tokens: int) -> MicroBatch:
    num_tokens = prompt_tokens + response_tokens
    (batch,) = pack([TokenSequence(np.zeros(num_tokens, np.int32), prompt_tokens)], num_tokens)
    return batch


def _step(
    policy: PolicyModel, optimizer: AdamW, batch: MicroBatch, tracker: MemTracker | None
) -> None:
    optimizer.zero_grad(set_to_none=True)
    for _ in range(MICRO_BATCHES):
        if tracker:
            tracker.reset_mod_stats()  # Otherwise it rejects a second pass.
        policy.score(batch, temperature=1.0).logprobs.sum().backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()


@contextmanager
def _fake_ranks(num_ranks: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield init_device_mesh("cpu", (num_ranks,))
    finally:
        dist.destroy_process_group()
