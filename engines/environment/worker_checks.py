"""Checks of what a user's environment returns. A part of the script `worker.py`, which imports
nothing of refrain."""

import math
import traceback

MAX_SCORE = 1e9
"""Largest absolute score: its square must fit the trainer's float32."""
MAX_CHARACTERS = 2**20
"""Most characters of an answer."""
MAX_MESSAGES = 256
ROLES = ("user", "tool", "system")
MAX_TRACEBACK_CHARACTERS = 4000


class Refused(Exception):
    """Fault of the user's file or of what its code returned."""


def checked_answer(result):
    """Return messages and score of what `step` returned. Raise Refused if it is neither."""
    if result is None:
        return {"messages": [], "score": None}
    if isinstance(result, tuple) and len(result) == 2:
        return {"messages": checked_messages(result[0]), "score": checked_score(result[1])}
    if isinstance(result, dict):
        messages = next(
            (result[name] for name in ("messages", "observation") if name in result), None
        )
        if messages is None and "score" not in result:
            raise Refused(f"step returned a dict without 'messages' and 'score': {shown(result)}")
        score = checked_score(result.get("score"))
        return {"messages": [] if messages is None else checked_messages(messages), "score": score}
    if isinstance(result, (str, list)):
        return {"messages": checked_messages(result), "score": None}
    return {"messages": [], "score": checked_score(result)}


def checked_messages(given):
    """Return a text or messages as messages."""
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(messages, (list, tuple)) or not 0 < len(messages) <= MAX_MESSAGES:
        raise Refused(
            f"step returned {shown(given)}: return a text, or 1 to {MAX_MESSAGES} messages such as "
            '{"role": "user", "content": "..."}'
        )
    return [checked_message(message) for message in messages]


def checked_message(message):
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Refused(f"a message is {shown(message)}: its role must be one of {', '.join(ROLES)}")
    text = message.get("content")
    if not isinstance(text, str):
        raise Refused(f"the content of a message is {shown(text)}: it must be a text")
    if len(text) > MAX_CHARACTERS:
        raise Refused(f"a message has {len(text):,} characters: return at most {MAX_CHARACTERS:,}")
    names = [name for name in ("role", "content", "name", "tool_call_id") if name in message]
    whole = {name: message[name] for name in names}
    for value in whole.values():
        if not isinstance(value, str) or any("\ud800" <= one <= "\udfff" for one in value):
            raise Refused(
                f"a message has {shown(value)}, which is not valid UTF-8: return "
                "text.encode('utf-8', 'replace').decode()"
            )
    return whole


def checked_score(score):
    """Return a score as float, or None. Raise Refused unless it is finite."""
    if score is None:
        return None
    if isinstance(score, dict):
        return checked_score(score.get("score"))
    try:
        number = float(score)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(score, str) or not abs(number) <= MAX_SCORE:
        raise Refused(f"the score is {shown(score)}: it must be a number within {MAX_SCORE:g}")
    return number


def explain(error):
    """Return the error's message, with the traceback if the user's code raised it."""
    raised = error.__cause__ if isinstance(error, Refused) else error
    text = str(error) if isinstance(error, Refused) else message_of(error)
    if raised is not None:
        lines = traceback.format_exception(type(raised), raised, raised.__traceback__)
        text = f"{text}\n{''.join(lines)[-MAX_TRACEBACK_CHARACTERS:]}"
    return text.encode(errors="backslashreplace").decode()


def message_of(error):
    try:
        return f"{type(error).__name__}: {str(error)[:MAX_TRACEBACK_CHARACTERS]}"
    except Exception as second:
        return f"{type(error).__name__}, whose message cannot be read ({type(second).__name__})"


def shown(value):
    try:
        return f"{str(value)[:80]!r} ({type(value).__name__})"
    except Exception:
        return f"a {type(value).__name__}"
