"""Check what a user's environment returns.

The worker checks to explain a fault to the user. refrain checks again, because it does not trust
that process. Workers import this module: see
`engines/user_code/importing.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from ..user_code.importing import UserFault, shown

ROLES = ("user", "tool", "system")
"""Roles that an environment may write. The assistant is the policy."""
TEXTS = ("content", "name", "tool_call_id")
"""Fields of a message beside its role."""
MAX_NAME = 256
"""Most characters of a message's `name` and `tool_call_id`."""
MAX_SCORE = 1e9
"""Largest absolute score: its square must fit the trainer's float32."""
MAX_MESSAGES = 100
"""Most messages of one answer."""
MAX_ANSWER_BYTES = 10**6
"""Largest size of an answer's messages, as JSON."""

Answer = dict[str, Any]
"""Fields of an `EnvironmentAnswer`."""


def answer_of(result: Any) -> Answer:
    """Return the answer that a result of `step` stands for.

    Text or messages go on. A tuple or a dict adds the turn's score. A score alone ends the
    conversation, and None ends it without one. Raises UserFault for anything else.
    """
    if result is None:
        return {"messages": [], "score": None, "ended": True}
    if isinstance(result, tuple) and len(result) == 2 and not isinstance(result[1], Mapping):
        return _going_on(*result)
    if isinstance(result, Mapping) and "role" not in result:
        return _of_fields(dict(result))
    if isinstance(result, (str, list, tuple, Mapping)):
        return _going_on(result, None)
    if _as_float(result) is None:
        raise UserFault(
            f"step() returned {shown(result)}: return a text, messages, a number or None"
        )
    return {"messages": [], "score": checked_score(result), "ended": True}


def ending_score(result: Any, method: str = "end()") -> float | None:
    """Return the score that a user's method returned: a number, `{"score": number}` or None."""
    is_number = result is None or _as_float(result) is not None
    answer = answer_of(result) if is_number or isinstance(result, Mapping) else None
    if answer is None or not answer["ended"]:
        raise UserFault(f"{method} returned {shown(result)}: return a number or None")
    return answer["score"]


def checked_score(score: Any) -> float:
    """Return a finite score. Raises UserFault for anything else."""
    number = _as_float(score)
    if number is None or not abs(number) <= MAX_SCORE:
        bound = f"within {MAX_SCORE:g}"
        raise UserFault(f"the environment returned {shown(score)}, not a finite number {bound}")
    return number


def checked_messages(messages: Any) -> list[dict[str, str]]:
    """Return messages that an environment may write. Raises UserFault for others."""
    if not isinstance(messages, (list, tuple)) or not 0 < len(messages) <= MAX_MESSAGES:
        size = f"{len(messages)}" if isinstance(messages, (list, tuple)) else shown(messages)
        raise UserFault(f"the environment returned {size} messages: return 1 to {MAX_MESSAGES}")
    for number, message in enumerate(messages, 1):
        problem = _message_problem(message)
        if problem:
            raise UserFault(f"message {number} of the environment {problem}")
    plain = [dict(message) for message in messages]
    size = len(json.dumps(plain, ensure_ascii=False).encode())
    if size > MAX_ANSWER_BYTES:
        raise UserFault(
            f"the environment returned messages of {size} bytes: return at most {MAX_ANSWER_BYTES}"
        )
    return plain


def _of_fields(fields: dict[str, Any]) -> Answer:
    unknown = fields.keys() - {"messages", "observation", "score"}
    observed = [fields[name] for name in ("messages", "observation") if name in fields]
    if unknown or len(observed) > 1 or not fields:
        raise UserFault(
            f"step() returned a dict with {', '.join(map(str, fields)) or 'nothing'}: return "
            "`score`, and `observation` or `messages` to go on"
        )
    if observed:
        return _going_on(observed[0], fields.get("score"))
    return {"messages": [], "score": checked_score(fields["score"]), "ended": True}


def _going_on(observed: Any, score: Any) -> Answer:
    if isinstance(observed, str):
        observed = [{"role": "user", "content": observed}]
    elif isinstance(observed, Mapping):
        observed = [observed]
    return {
        "messages": checked_messages(observed),
        "score": None if score is None else checked_score(score),
        "ended": False,
    }


def _as_float(number: Any) -> float | None:
    if isinstance(number, (str, bytes)) or not isinstance(number, SupportsFloat):
        return None
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _message_problem(message: Any) -> str | None:
    """Return why an environment may not write this message."""
    if not isinstance(message, Mapping):
        return f'is {shown(message)}: write {{"role": "user", "content": "..."}}'
    if message.get("role") not in ROLES:
        return f"has the role {shown(message.get('role'))}: write one of {', '.join(ROLES)}"
    unknown = sorted(map(str, message.keys() - {"role", *TEXTS}))
    if unknown:
        return f"has the field {shown(unknown[0])}: write only role, {', '.join(TEXTS)}"
    if "content" not in message:
        return "has no content: write a string"
    problems = (_text_problem(name, message[name]) for name in TEXTS if name in message)
    return next(filter(None, problems), None)


def _text_problem(name: str, text: Any) -> str | None:
    if not isinstance(text, str):
        return f"has a {name} that is {shown(text)}: write a string"
    return broken_text(name, text)


def broken_text(name: str, text: str) -> str | None:
    """Return why the text of a message's field `name` cannot be used."""
    if name != "content" and len(text) > MAX_NAME:
        return f"has a {name} of {len(text)} characters: write at most {MAX_NAME}"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"has half of a surrogate pair in its {name}, at character {error.start}: write "
            'text.encode("utf-8", "replace").decode()'
        )
    return None
