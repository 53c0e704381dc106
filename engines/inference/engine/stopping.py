"""Stop strings, checked in vLLM's engine core, where tokens are appended.

vLLM checks them in its front end, which receives tokens late here (`output_buffer`). A response
ends with the first token that completes a stop string in its text. This depends on that token and
the few before it in the response only. It does not depend on drafts, which append several tokens at
once, nor on the engine that generated the earlier tokens. As in vLLM, the response keeps all tokens
of the stop string, even if the last one contains text after it.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

STOP = "stop"
"""Key in `SamplingParams.extra_args` of (number of prompt tokens, *stop strings), or None."""
_PART = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is only a part of a character."""


class StopStrings:
    """Strings that end a response. `decode`: turns tokens into text, special tokens included."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        # Each token has at least one byte. One more token, because decoding may drop the leading
        # space of the first one.
        self._num_tokens = 1 + max(len(string.encode()) for string in strings)
        self._may_complete = cache(partial(_may_complete, self._strings, decode))

    def num_kept(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """Return how many tokens of `new` to keep, up to the one that completes a stop string.

        Return None if none does. `before`: at least the last `num_tokens_before` tokens of the
        response so far.
        """
        tokens = [*before, *new]
        for end, token in enumerate(new, len(before) + 1):
            if self._may_complete(token):
                text = self._decode(tokens[max(0, end - self._num_tokens) : end])
                if any(string in text for string in self._strings):
                    return end - len(before)
        return None

    def may_end_in(self, new: Sequence[int]) -> bool:
        """Return whether one of these tokens could complete a stop string."""
        return any(map(self._may_complete, new))

    @property
    def num_tokens_before(self) -> int:
        """Most tokens of a stop string before the one that completes it."""
        return self._num_tokens - 1


def _may_complete(
    strings: Sequence[str], decode: Callable[[Sequence[int]], str], token: int
) -> bool:
    """Return whether the text of a token could end one of the strings.

    We decode the token after a copy of itself, because some tokenizers drop a leading space.
    """
    text = decode([token, token]).removeprefix(decode([token]))
    return _PART in text or any(
        string in text or any(text.startswith(string[i:]) for i in range(1, len(string)))
        for string in strings
    )
