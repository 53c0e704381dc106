"""Check an environment's messages, and cut those that are too long."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from refrain.engines.environment.answers import ROLES, TEXTS, broken_text

MAX_MESSAGES = 256
"""Most messages of one observation."""
CHARACTERS_PER_TOKEN = 32
"""Most characters of a content that are tokenised, per token that an observation may have."""
MAX_TRIES = 20
Encode = Callable[[Sequence[str]], list[int]]
"""Function from the contents to the tokens of the whole observation."""


def check_messages(messages: Any) -> None:
    """Raise ValueError unless these are messages that an environment may write."""
    if not isinstance(messages, list | tuple) or not 0 < len(messages) <= MAX_MESSAGES:
        raise ValueError(
            f"the environment must return 1 to {MAX_MESSAGES} messages in a list, such as "
            '[{"role": "user", "content": "..."}]'
        )
    for number, message in enumerate(messages, 1):
        if problem := _problem(message):
            raise ValueError(f"message {number} of the environment {problem}")


def _problem(message: Any) -> str | None:
    """Return why an environment may not write this message."""
    if not isinstance(message, Mapping):
        return 'is not an object: write {"role": "user", "content": "..."}'
    if message.get("role") not in ROLES:
        return f"has the role {message.get('role')!r:.60}: write one of {', '.join(ROLES)}"
    if unknown := sorted(map(str, message.keys() - {"role", *TEXTS})):
        return f"has the field {unknown[0]!r:.60}: write only role, {', '.join(TEXTS)}"
    if "content" not in message:
        return "has no content: write a string"
    for field in TEXTS:
        if field in message and (problem := _text_problem(field, message[field])):
            return problem
    return None


def _text_problem(field: str, text: Any) -> str | None:
    if not isinstance(text, str):
        return f"has a {field} that is not a string but {type(text).__name__}: write a string"
    return broken_text(field, text)


def fitted(
    contents: Sequence[str],
    max_tokens: int,
    encode: Encode,
    starts: Callable[[str], Sequence[int]],
) -> list[int]:
    """Return at most `max_tokens` tokens of an observation. Cut the longest contents at the same
    number of tokens, and say so in them: `... [cut: 12 characters]`.

    `starts`: returns the position of each token in a content. Raises ValueError if the template's
    frame alone is too long.
    """
    begun = [content[: max_tokens * CHARACTERS_PER_TOKEN] for content in contents]
    positions = list(map(starts, begun))
    counts = list(map(len, positions))

    def encoded(budget: int) -> list[int]:
        limit = equal_limit(counts, budget)
        return encode(
            [beginning(*one, limit) for one in zip(contents, begun, positions, strict=True)]
        )

    tokens, budget = encoded(sum(counts)), sum(counts)
    if len(tokens) <= max_tokens:
        return tokens
    least = encoded(0)
    if (room := max_tokens - len(least)) < 0:
        raise ValueError(
            f"an observation of {len(contents)} messages has {len(least)} tokens with its contents "
            f"cut, over environment.max_observation_tokens={max_tokens}: raise it"
        )
    for _ in range(MAX_TRIES):
        budget = min(budget - 1, budget * room // max(1, len(tokens) - len(least)))
        tokens = encoded(max(0, budget))
        if len(tokens) <= max_tokens:
            return tokens
    return least


def equal_limit(counts: Sequence[int], budget: int) -> int:
    """Return the largest limit with which `min(count, limit)` adds up to at most `budget`."""
    for index, count in enumerate(sorted(counts)):
        share = budget // (len(counts) - index)
        if count > share:
            return share
        budget -= count
    return max(counts)


def beginning(content: str, begun: str, starts: Sequence[int], max_tokens: int) -> str:
    """Return a content, or its beginning of so many tokens and a note if that is shorter.

    `begun`: the tokenised beginning. `starts`: positions of its tokens.
    """
    kept = len(begun) if len(starts) <= max_tokens else starts[max_tokens]
    cut = f"{content[:kept]}... [cut: {len(content) - kept} characters]"
    return cut if len(cut) < len(content) else content
