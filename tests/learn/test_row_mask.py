"""`row_mask` recognises the model's mask function as causal, window or chunks, or refuses it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from refrain.engines.learn.bounds import SampleBounds
from refrain.engines.learn.row_mask import RowMask, row_mask, row_of

CPU = torch.device("cpu")
PADDING = torch.zeros(1, dtype=torch.long)


def mask_of(
    function: Callable[..., Any], longest: int, size: int | None = None, **more: object
) -> RowMask:
    num_tokens = [longest, 5]
    with row_of(SampleBounds.of(num_tokens, CPU)):
        return row_mask(
            q_length=sum(num_tokens),
            kv_length=sum(num_tokens),
            mask_function=function,
            config=LlamaConfig(),
            device=CPU,
            local_size=size,
            **more,
        )


@pytest.mark.parametrize("longest", [5, 8, 9, 16, 17, 40])
def test_masks_are_known_by_what_they_do(longest: int) -> None:
    made = mask_of(causal_mask_function, longest)
    assert (made.window, made.chunk) == (None, None)
    size_seen = 8 if longest > 8 else None
    for function in (
        sliding_window_causal_mask_function(8),
        # A model that adds its own window passes no `local_size`.
        and_masks(causal_mask_function, sliding_window_overlay(8)),
    ):
        for size in (8, None):
            made = mask_of(function, longest, size)
            assert (made.window, made.chunk) == (size_seen, None)
    made = mask_of(chunked_causal_mask_function(8, PADDING), longest, 8)
    assert (made.window, made.chunk) == (None, size_seen)


@pytest.mark.parametrize(
    "look",
    [
        lambda _, q, k: (k < 2) | (k > q - 8),  # A window, and the first tokens.
        lambda h, q, k: (h == 0) | (k > q - 8),  # A window in some heads only.
        lambda _, q, k: k > q - 8 - 4 * (q > 30),  # A window that grows.
        lambda _, q, k: (k // 8 == q // 8) | (k // 8 == q // 8 - 1),  # Chunks that overlap.
    ],
)
def test_another_mask_is_refused(look: Callable[..., Any]) -> None:
    def function(_: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & look(head, query, key)

    with pytest.raises(ValueError, match="llama makes a mask that is neither causal nor"):
        mask_of(function, 40, 8)


def test_tokens_that_are_masked_are_refused() -> None:
    given = torch.ones(1, 45, dtype=torch.bool)
    assert mask_of(causal_mask_function, 40, attention_mask=given).window is None
    given[0, 3] = False
    with pytest.raises(ValueError, match="llama masks tokens of a row that has no padding"):
        mask_of(causal_mask_function, 40, attention_mask=given)


def test_mask_that_sees_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="llama makes a mask that is neither causal nor"):
        mask_of(bidirectional_mask_function, 40)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask[:, :, :, :4],
        lambda mask: mask.dtype,
        lambda mask: torch.zeros(2) + mask,
        lambda mask: torch.where(mask, 0.0, 1.0),
    ],
)
def test_a_model_that_works_on_its_mask_is_refused(use: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="llama works on its mask itself"):
        use(mask_of(causal_mask_function, 40))


def test_chunks_are_cut_within_each_sample() -> None:
    bounds = SampleBounds.of([20, 8, 3], CPU)
    assert bounds.cut(8).bounds.tolist() == [0, 8, 16, 20, 28, 31]
    assert bounds.cut(8).longest == 8
    assert bounds.cut(20) is bounds.cut(None) is bounds
