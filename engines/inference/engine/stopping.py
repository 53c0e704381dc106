"""Stop strings, looked for where tokens are appended: in vLLM's engine core.

vLLM looks for them in its front end, which here learns of tokens later (`holding`). A response ends
with the first token by which its text has a stop string. Whether a token is that one depends on the
few tokens before it in the response alone: not on drafts, which append several tokens at once, nor
on the engine that the earlier ones are from. Tokens are kept whole, those of the stop string and
what else the last one says included, as vLLM keeps them.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

STOP = "stop"
"""Name in `SamplingParams.extra_args` of a request's stop strings, after the number of tokens of
its prompt; None without any."""
_PART = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that is part of a character."""


class StopStrings:
    """Strings that end a response. `decode`: text of tokens, special ones included."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._strings = tuple(strings)
        self._decode = decode
        # A token has a byte at least, and the first one's leading space may be left out.
        self._num_tokens = 1 + max(len(string.encode()) for string in strings)
        self._may_complete = cache(partial(_may_complete, self._strings, decode))

    def num_kept(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """Tokens of `new` up to the one that completes a stop string; None: none does.

        `before`: tokens of the response so far, the last `num_tokens_before` at least.
        """
        tokens = [*before, *new]
        for end, token in enumerate(new, len(before) + 1):
            if self._may_complete(token):
                text = self._decode(tokens[max(0, end - self._num_tokens) : end])
                if any(string in text for string in self._strings):
                    return end - len(before)
        return None

    @property
    def num_tokens_before(self) -> int:
        """Tokens that a stop string may have before the one that completes it."""
        return self._num_tokens - 1


def _may_complete(
    strings: Sequence[str], decode: Callable[[Sequence[int]], str], token: int
) -> bool:
    """Whether what a token adds after another, itself, could be the end of one of these."""
    text = decode([token, token]).removeprefix(decode([token]))
    return _PART in text or any(
        string in text or any(text.startswith(string[i:]) for i in range(1, len(string)))
        for string in strings
    )
