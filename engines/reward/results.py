"""Check what a user's scorer returns.

The scorer's process checks to explain a fault to the user. refrain checks again, because it does
not trust that process. Workers import this module: see `engines/user_code/importing.py`.
"""

import json
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from ..user_code.importing import UserFault, shown

MAX_SCORE = 1e9
"""Largest absolute score: its square must fit the trainer's float32."""
MAX_PART = 1e100
"""Largest absolute number in an extra value, so that sums over a step stay finite."""
MAX_PARTS = 100
"""Most extra values of one response."""
MAX_NAME_CHARACTERS = 200
MAX_EXTRA_BYTES = 2**16
"""Largest size of all extra values of a response, as JSON."""
MAX_GROUP_BYTES = 2**17
"""Largest size of the scores and extra values of a group, as JSON."""
MAX_DEPTH = 20
"""Deepest nesting of an extra value."""

Scored = tuple[float, dict[str, Any]]
"""Score and extra values of one response."""


def checked_scores(result: Any, num: int) -> list[Scored]:
    """Return `checked_score` of each response of a group of `num`.

    Raises UserFault as `checked_score` does, and unless the result is a list of `num` scores.
    """
    if hasattr(result, "tolist"):
        result = result.tolist()  # NumPy's or torch's.
    if not isinstance(result, list | tuple):
        raise UserFault(
            f"the scorer returned {shown(result)}, not a list of {num} scores: with reward.group "
            "it scores all responses to a prompt"
        )
    if len(result) != num:
        raise UserFault(
            f"the scorer returned {len(result)} scores for {num} responses: return one for each, "
            "in their order"
        )
    scores = [_checked_member(one, place) for place, one in enumerate(result)]
    size = len(json.dumps(list(map(as_dict, scores))))
    if size > MAX_GROUP_BYTES:
        raise UserFault(
            f"the values that the scorer returned for a group take {size} bytes as JSON: shorten "
            f"them to at most {MAX_GROUP_BYTES} bytes"
        )
    return scores


def _checked_member(result: Any, place: int) -> Scored:
    try:
        return checked_score(result)
    except UserFault as error:
        raise UserFault(f"in place {place} of its list {error}") from None


def checked_score(result: Any) -> Scored:
    """Return the score and the extra values, converted to what JSON can hold.

    The scorer's process calls this to explain the fault. refrain calls it again, because it does
    not trust that process. Extra numbers that are not finite or too large become None.

    Raises UserFault unless the result is a finite number or a dict whose `score` is one. Also
    raises UserFault for extra values that are too many, too large or not valid text.
    """
    extra: dict[str, Any] = {}
    score = result
    if isinstance(result, Mapping):
        if "score" not in result:
            raise UserFault(f"the scorer returned a dict without 'score': {shown(result)}")
        score = result["score"]
        extra = {str(name): value for name, value in result.items() if name != "score"}
    if not isinstance(score, SupportsFloat) or not abs(number := _as_float(score)) <= MAX_SCORE:
        bound = f"within {MAX_SCORE:g}"
        raise UserFault(f"the scorer returned {shown(score)}, not a finite number {bound}")
    return number, _checked_extra(extra)


def _as_float(number: SupportsFloat) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _checked_extra(extra: dict[str, Any]) -> dict[str, Any]:
    if len(extra) > MAX_PARTS or any(len(name) > MAX_NAME_CHARACTERS for name in extra):
        raise UserFault(
            f"the scorer returned {len(extra)} values beside the score: return at most "
            f"{MAX_PARTS}, with names of at most {MAX_NAME_CHARACTERS} characters"
        )
    text = json.dumps(extra, default=str)
    if len(text) > MAX_EXTRA_BYTES:
        raise UserFault(
            f"the values that the scorer returned beside the score take {len(text)} bytes as JSON: "
            f"shorten them to at most {MAX_EXTRA_BYTES} bytes"
        )
    return {
        _checked_value(name, name): _checked_value(value, name)
        for name, value in json.loads(text).items()
    }


def _checked_value(value: Any, name: str, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise UserFault(f"{shown(name)} is nested over {MAX_DEPTH} levels deep: flatten it")
    if isinstance(value, list):
        return [_checked_value(one, name, depth + 1) for one in value]
    if isinstance(value, dict):
        return {
            _checked_value(key, name): _checked_value(one, name, depth + 1)
            for key, one in value.items()
        }
    if isinstance(value, int | float):
        return value if abs(value) <= MAX_PART else None
    try:
        return value.encode().decode() if isinstance(value, str) else value
    except UnicodeEncodeError:
        raise UserFault(
            f"the scorer returned a text that is not valid UTF-8 in {shown(name)}: return "
            "text.encode('utf-8', 'replace').decode()"
        ) from None


def as_dict(scored: Scored) -> dict[str, Any]:
    score, extra = scored
    return {"score": score} | extra
