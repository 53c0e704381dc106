"""CUDA graphs of an engine that drafts.

vLLM keeps its full graphs, whose attention is captured too, for steps in which every request has
all the drafts that it may have. Drafts of refrain's are ragged, so there would be none: not for
plain decoding either, in the first epoch or where drafting does not pay.

    one token a request       full graphs, up to `max_num_seqs` requests
    drafts for some           piecewise graphs, up to `MOST_TOKENS`, or what a step can have
    more tokens               none: kernels take longer than their launches
"""

from typing import Any

MOST_TOKENS = 1024
"""Tokens of a step from which on graphs save nothing."""
_LEAST_STEP = 8
_PER_OCTAVE = 8
"""Sizes until the next power of two: an eighth of a step is filled up at most."""


def capture_sizes(max_num_seqs: int, step_tokens: int) -> list[int]:
    """Tokens of the steps that are captured, ascending. `step_tokens`: of a step, at most."""
    plain = min(max_num_seqs, step_tokens)
    most = min(step_tokens, max(MOST_TOKENS, plain))
    sizes = {size for size in (1, 2, 4, plain, most) if size <= most}
    size = _LEAST_STEP
    while size < most:
        sizes.add(size)
        size += max(_LEAST_STEP, (1 << (size.bit_length() - 1)) // _PER_OCTAVE)
    return sorted(sizes)


def decode_plainly(runner: Any) -> None:
    """Have vLLM's runner take a step of one token a request for what its full graphs serve. Call
    before they are captured."""
    runner.uniform_decode_query_len = 1
    runner.cudagraph_dispatcher.uniform_decode_query_len = 1
