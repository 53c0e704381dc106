"""Parse tool calls in the format of Hermes, which Qwen2.5 to Qwen3.6 use too.

    <think>Should I use <tool_call>?</think>                      ignored
    <tool_call>
    {"name": "multiply", "arguments": {"a": 6, "b": 7}}           a call
    </tool_call>

The parser executes and evaluates nothing. It reads a text at most twice, however it is written.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from refrain.schemas.environment import ToolCall, TurnText

TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tags that must be in the text, also where the tokenizer makes special tokens of them."""
MAX_DEPTH = 32
"""Most levels of lists and objects in a call."""
MAX_DIGITS = 100
"""Most characters of a whole number in a call."""
EXAMPLE = '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
_OPEN, _CLOSE, _THINK, _END_OF_THINKING = TAGS
_TAG = re.compile("|".join(map(re.escape, TAGS)))
_SPACE = re.compile(r"\s*")


class Parser(NamedTuple):
    """A parser of tool calls."""

    tags: Collection[str]
    """Special tokens that it looks for, so they must be in a turn's text."""
    parse: Callable[[str, int], TurnText]
    """Function from a turn's text and the most calls of one turn to the turn with its calls."""


class Malformed(ValueError):
    """Calls that cannot be executed. The message is for the policy."""


def parse(text: str, max_calls: int) -> TurnText:
    """Return a turn with its tool calls. A turn with a problem has no calls, so no tool is executed
    for half of a turn.

    `text`: from `TurnRenderer.text_of`. `max_calls`: most calls of one turn.
    """
    try:
        return TurnText(text, tuple(_calls(text, max_calls)))
    except Malformed as problem:
        return TurnText(text, problem=str(problem))


def _calls(text: str, max_calls: int) -> list[ToolCall]:
    """Return the calls. A prompt may end with `<think>`, so the turn may begin with thinking."""
    try:
        return _calls_from(text, 0, max_calls)
    except Malformed:
        end = text.find(_END_OF_THINKING)
        if end < 0 or _THINK in text[:end]:
            raise
        return _calls_from(text, end + len(_END_OF_THINKING), max_calls)


def _calls_from(text: str, start: int, max_calls: int) -> list[ToolCall]:
    calls: list[ToolCall] = []
    while tag := _TAG.search(text, start):
        start = tag.end()
        if tag[0] == _OPEN:
            if len(calls) == max_calls:
                raise Malformed(f"You made over {max_calls} tool calls in one turn. Make fewer.")
            call, start = _call(text, start, f"Tool call {len(calls) + 1}")
            calls.append(call)
        elif tag[0] == _THINK:
            start = _end_of_thinking(text, start)
        elif tag[0] == _END_OF_THINKING:
            calls.clear()
        else:
            raise Malformed(f"There is a {_CLOSE} without {_OPEN}. Write {EXAMPLE}.")
    return calls


def _end_of_thinking(text: str, start: int) -> int:
    end = text.find(_END_OF_THINKING, start)
    if end >= 0:
        return end + len(_END_OF_THINKING)
    if text.find(_OPEN, start) >= 0:
        raise Malformed(
            f"The thinking is not closed, so its tool calls are ignored. Write {_END_OF_THINKING} "
            "before you call a tool."
        )
    return len(text)


def _call(text: str, start: int, name: str) -> tuple[ToolCall, int]:
    """Return the call that starts here, and the position after its closing tag. `name`: name of the
    call in messages."""
    begin = _after_space(text, start)
    try:
        value, end = _decoder.raw_decode(text, begin)
    except json.JSONDecodeError as error:
        raise Malformed(
            f"{name} is not valid JSON: {error.msg} at character {error.pos - begin + 1}. "
            f"Write {EXAMPLE}."
        ) from error
    except RecursionError as error:
        raise _too_deep(name) from error
    except ValueError as error:
        raise Malformed(f"{name} is not valid JSON: {error}.") from error
    end = _after_space(text, end)
    if not text.startswith(_CLOSE, end):
        raise Malformed(f"{name} is not closed. Write {_CLOSE} right after its JSON object.")
    return checked_call(value, name), end + len(_CLOSE)


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def checked_call(value: Any, name: str) -> ToolCall:
    """Return a call of a JSON value. Raises Malformed."""
    if not isinstance(value, dict):
        raise Malformed(f"{name} is not a JSON object. Write {EXAMPLE}.")
    tool = value.get("name")
    if not isinstance(tool, str) or not tool:
        raise Malformed(f'{name} has no "name". Give the name of a tool as a string.')
    arguments = _arguments(value.get("arguments"), name)
    if _is_deep(arguments):
        raise _too_deep(name)
    if not _is_text([tool, arguments]):
        raise Malformed(f"{name} has half of a surrogate pair. Write whole characters.")
    return ToolCall(tool, arguments)


def _arguments(value: Any, name: str) -> dict[str, Any]:
    """Return the arguments of a call, which may be a JSON object or the text of one."""
    if isinstance(value, str):
        try:
            value = _decoder.decode(value)
        except RecursionError as error:
            raise _too_deep(name) from error
        except ValueError as error:
            raise Malformed(f'The "arguments" of {name} are not valid JSON: {error}.') from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Malformed(
            f'The "arguments" of {name} are not a JSON object. Write {{"parameter": value}}.'
        )
    return value


def _is_deep(value: Any) -> bool:
    """Return whether a value has over `MAX_DEPTH` levels."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in _inside(one)]
    return any(isinstance(one, dict | list) for one in level)


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _is_text(value: Any) -> bool:
    """Return whether all strings of a value can be encoded."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep(name: str) -> Malformed:
    return Malformed(f"{name} has over {MAX_DEPTH} levels of lists and objects. Use fewer.")


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has over {MAX_DIGITS} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


_decoder = json.JSONDecoder(
    strict=False, parse_int=_whole, parse_float=_finite, parse_constant=_refuse_constant
)
"""Decoder that accepts line breaks in strings, which models write in code."""

HERMES = Parser(TAGS, parse)
