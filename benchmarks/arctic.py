"""Arctic Inference's suffix decoding, to compare with if it is installed."""

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

PACKAGE = "arctic-inference"
DEPTH, FACTOR = 64, 4.0
"""Depth of its trees, and draft tokens for each matched token. vLLM's defaults, 24 and 1, would
limit drafts to 12 tokens."""


def find_cache_class() -> Any | None:
    """Return `SuffixDecodingCache`, or None if it is not installed."""
    try:
        return importlib.import_module("arctic_inference.suffix_decoding").SuffixDecodingCache
    except ModuleNotFoundError:
        return None


def build_cache(cache_class: Any, prompt: np.ndarray, responses: Sequence[np.ndarray]) -> Any:
    """Return a cache of these responses to a prompt, all int32."""
    cache = cache_class(max_tree_depth=DEPTH)
    for i, response in enumerate(responses):
        cache.start_request(("history", i), prompt)
        cache.add_active_response(("history", i), response)
        cache.stop_request(("history", i))
    return cache


def draft(cache: Any, request: Any, context: Any, max_tokens: int) -> list[int]:
    """Return a draft of at most `max_tokens` tokens that may follow `context` (int32,
    contiguous)."""
    return cache.speculate(
        request, context, max_spec_tokens=max_tokens, max_spec_factor=FACTOR
    ).token_ids
