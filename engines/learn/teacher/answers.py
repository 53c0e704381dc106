"""Read what a teacher's server answers. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_TOLERANCE = 1e-3
"""Most by which rounding may raise a log-probability above 0."""
_SHOWN = 200
"""Characters of an answer that an error shows."""


def read_logprobs(answer: Any, token_ids: ArrayLike) -> NDArray[np.float32]:
    """Return the log-probabilities of a prompt's tokens after the first; [len(token_ids) - 1].

    `answer`: the JSON value that `/completions` returned for this prompt, with `prompt_logprobs`
    as vLLM has them. Raise ValueError unless it has a finite log-probability of each token.
    """
    ids = np.asarray(token_ids).tolist()
    entries = _entries(answer)
    if len(entries) != len(ids):
        raise ValueError(
            f"it has log-probabilities of {len(entries)} tokens, and the prompt has {len(ids)}"
        )
    values = [_logprob(entry, id, at) for at, (entry, id) in enumerate(_pairs(entries, ids), 1)]
    return np.array(values, np.float32)


def _pairs(entries: Sequence[Any], ids: Sequence[int]) -> zip:
    """Pair the entries with their tokens. The first token has no context, and so no entry."""
    return zip(entries[1:], ids[1:], strict=True)


def _entries(answer: Any) -> list[Any]:
    match answer:
        case {"choices": [{"prompt_logprobs": list(entries)}]}:
            return entries
        case {"choices": [{}]}:
            raise ValueError(
                "it has no prompt_logprobs: the teacher needs a server that returns "
                "log-probabilities of the prompt, such as vLLM"
            )
    raise ValueError(f"it is no completion: {shortened(repr(answer))}")


def _logprob(entry: Any, id: int, at: int) -> float:
    match entry:
        case dict() if isinstance(found := entry.get(str(id)), dict):
            value = found.get("logprob")
        case dict() if entry:
            raise ValueError(
                f"token {at} of the prompt is {id} for the policy and {_other(entry)} for the "
                "teacher: their tokenizers differ"
            )
        case _:
            raise ValueError(f"it has no log-probability of token {at} of the prompt")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"the log-probability of token {at} of the prompt is {value}")
    if value > _TOLERANCE:
        raise ValueError(
            f"the log-probability of token {at} of the prompt is {value:g}, which is above 0: "
            "start the server without --logprobs-mode"
        )
    return float(value)


def _other(entry: dict[str, Any]) -> str:
    id, about = next(iter(entry.items()))
    text = about.get("decoded_token") if isinstance(about, dict) else None
    return f"{id} ({text!r})" if text else id


def shortened(text: str) -> str:
    """Return the text in one line, cut for an error."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
