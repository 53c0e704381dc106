"""Arctic Inference's suffix decoding, a peer to measure against where it is installed."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PACKAGE = "arctic-inference"
DEPTH, FACTOR = 64, 4.0
"""Depth of its trees, and draft tokens for each token that matched. vLLM's defaults, 24 and 1,
would cap drafts at 12 tokens."""


def find_cache_class() -> Any | None:
    """`SuffixDecodingCache`, or None when it is not installed."""
    try:
        return importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
    except ModuleNotFoundError:
        return None


def build_cache(cache_class: Any, prompt: np.ndarray, responses: Sequence[np.ndarray]) -> Any:
    """A cache of these responses to a prompt, all int32."""
    cache = cache_class(max_tree_depth=DEPTH)
    for i, response in enumerate(responses):
        cache.start_request(("history", i), prompt)
        cache.add_active_response(("history", i), response)
        cache.stop_request(("history", i))
    return cache


def draft(cache: Any, request: Any, context: Any, max_tokens: int) -> list[int]:
    """Draft of at most so many tokens that may follow `context` (int32, contiguous)."""
    return cache.speculate(
        request, context, max_spec_tokens=max_tokens, max_spec_factor=FACTOR
    ).token_ids
