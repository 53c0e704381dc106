"""CUDA graphs of an engine that drafts.

Full graphs capture attention too. vLLM uses them only for steps in which every request has the
largest possible draft. refrain's drafts differ in length, so vLLM would use no full graphs at all,
not even in the first epoch or when drafting does not pay. We use them for plain decoding instead:

    one token per request     full graphs, up to `max_num_seqs` requests
    drafts for some           piecewise graphs, up to `MOST_TOKENS` or the largest step
    more tokens               no graphs: kernels take longer than their launches
"""

from typing import Any

MOST_TOKENS = 1024
"""Tokens of a step above which graphs save no time."""
_LEAST_STEP = 8
_PER_OCTAVE = 8
"""Captured sizes up to the next power of two, so at most an eighth of a step is padding."""


def capture_sizes(max_num_seqs: int, step_tokens: int) -> list[int]:
    """Return the step sizes to capture, in tokens, ascending. `step_tokens`: the largest step."""
    plain = min(max_num_seqs, step_tokens)
    most = min(step_tokens, max(MOST_TOKENS, plain))
    sizes = {size for size in (1, 2, 4, plain, most) if size <= most}
    size = _LEAST_STEP
    while size < most:
        sizes.add(size)
        size += max(_LEAST_STEP, (1 << (size.bit_length() - 1)) // _PER_OCTAVE)
    return sorted(sizes)


def decode_plainly(runner: Any) -> None:
    """Let vLLM's V1 runner use full graphs for steps of one token per request.

    Call before vLLM captures its graphs.
    """
    runner.uniform_decode_query_len = 1
    runner.cudagraph_dispatcher.uniform_decode_query_len = 1


def decode_plainly_on_v2(runner: Any) -> None:
    """Do the same for vLLM's V2 runner. Call before it makes its KV cache: it chooses its graphs
    then."""
    initialize = runner.initialize_kv_cache

    def initialize_kv_cache(*args: Any, **kwargs: Any) -> None:
        with_drafts, runner.decode_query_len = runner.decode_query_len, 1
        try:
            initialize(*args, **kwargs)
        finally:
            runner.decode_query_len = with_drafts

    runner.initialize_kv_cache = initialize_kv_cache
