"""Give a step its drafts on the device (vLLM 0.32, V2 runner). `ahead` says what they are.

When a step begins, the tokens of the step before lie on the device, and the host does not wait for
them. So a kernel compares them with the draft, and puts the tokens after them where vLLM reads the
draft tokens of a step.
"""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from engines.inference.drafting.step_drafts import NUM, START, TOKENS, StepDrafts

_START, _NUM, _TOKENS = tl.constexpr(START), tl.constexpr(NUM), tl.constexpr(TOKENS)


def install(runner: Any) -> None:
    """Let a V2 runner verify the drafts of `StepDrafts`. Call once, before the first request."""
    update = runner.update_requests

    def update_and_place(step: Any) -> None:
        update(step)
        if (drafts := getattr(step, "drafts", None)) is not None:
            place(runner.req_states, drafts)

    runner.update_requests = update_and_place
    runner.speculator = NoProposals(runner)


class NoProposals:
    """Speculator that proposes nothing: the drafts come with the next step."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, runner: Any) -> None:
        self._nothing = torch.zeros_like(runner.req_states.draft_tokens)

    def propose(self, input_batch: Any, *_: Any, **__: Any) -> Tensor:
        return self._nothing[: input_batch.num_reqs]


def place(states: Any, drafts: StepDrafts) -> None:
    """Write the draft tokens of a step. `states`: vLLM's `RequestState` as the step begins."""
    slots = np.array([states.req_id_to_index[id] for id in drafts.ids], np.int32)
    packed = np.ascontiguousarray(np.column_stack([drafts.packed, slots]))
    tokens, placed = states.all_token_ids.gpu, states.draft_tokens
    num_columns, most = packed.shape[1] - 1, placed.shape[1]
    _place[(len(slots),)](
        async_tensor_h2d(packed, device=placed.device),
        num_columns,
        tokens,
        tokens.stride(0),
        states.total_len.gpu,
        placed,
        most,
        COLUMNS=1 << (num_columns - 1).bit_length(),
        MOST=1 << (most - 1).bit_length(),
    )


@triton.jit(do_not_specialize=["num_columns"])
def _place(
    packed_ptr,
    num_columns,
    text_ptr,
    text_stride,
    num_tokens_ptr,
    placed_ptr,
    most,
    COLUMNS: tl.constexpr,
    MOST: tl.constexpr,
):
    """Place the draft of one request. Where its text differs from the draft, place token 0."""
    draft_ptr = packed_ptr + tl.program_id(0) * (num_columns + 1)
    slot = tl.load(draft_ptr + num_columns).to(tl.int64)
    start, num = tl.load(draft_ptr + _START), tl.load(draft_ptr + _NUM)
    num_since = tl.load(num_tokens_ptr + slot) - start
    columns = tl.arange(0, COLUMNS)
    is_known = columns < tl.minimum(num_since, num)
    draft = tl.load(draft_ptr + _TOKENS + columns, mask=is_known, other=0)
    text = tl.load(text_ptr + slot * text_stride + start + columns, mask=is_known, other=0)
    num_wrong = tl.sum((draft != text).to(tl.int32), axis=0)
    num_left = tl.where(num_wrong == 0, num - num_since, 0)
    columns = tl.arange(0, MOST)
    is_draft = columns < num_left
    tokens = tl.load(draft_ptr + _TOKENS + num_since + columns, mask=is_draft, other=0)
    tl.store(placed_ptr + slot * most + columns, tokens.to(tl.int64), mask=columns < most)
