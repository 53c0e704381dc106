"""Chat completions as OpenAI writes them: what an agent may ask, and what it gets.

The model samples one line of turns, and no message is tokenised twice. So each call of an agent has
to repeat the conversation so far, and may add messages at its end:

    call 1   prompt                                       the model has sampled this turn already
    call 2   prompt, turn 1, tool                         the tool's message is observed
    call 3   prompt, turn 1, tool, turn 2, user

Workers import this module: see `engines/user_code/importing.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ..user_code.importing import UserFault, as_text, shown
from .answers import TEXTS, checked_messages

MODEL = "policy"
"""Name of the model in answers. A request may give any name."""
OPEN, END_OF_THINKING = "<tool_call>", "</think>"
"""Tags in a turn: its calls begin at the first `OPEN` after its thinking."""
MAX_SHOWN = 200
"""Most characters of a message in an error."""
Fields = dict[str, Any]
"""Fields of a message that are not empty."""


def check_request(request: Mapping[str, Any], tools: Sequence[Any]) -> None:
    """Raise UserFault for a request whose answer would not be what it asks for.

    Settings of the sampling are ignored: those of the run are trained. `tools`: JSON schemas that
    the prompt shows.
    """
    problem = next((text for text, wrong in _problems(request) if wrong), None)
    if problem is not None:
        raise UserFault(problem)
    given = request.get("tools")
    if given and not (isinstance(given, (list, tuple)) and list(given) == list(tools)):
        raise UserFault(
            f"a call passes the tools {_names(given)}, but the prompt shows {_names(tools)}: "
            "declare the tools in `tools` of your file, and pass model.tools or none"
        )


def _problems(request: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """Return what may be wrong with a request's settings, and whether it is."""
    form = request.get("response_format") or {}
    kind = form.get("type") if isinstance(form, Mapping) else form
    return [
        ("a call asks for a stream: leave out `stream`", bool(request.get("stream"))),
        (
            f"a call asks for {shown(request.get('n'))} answers: a conversation is one line of "
            "turns, so leave out `n`, and set rollout.group_size",
            request.get("n") not in (None, 1),
        ),
        (
            f"a call sets tool_choice to {shown(request.get('tool_choice'))}: the model chooses, "
            'so leave it out, or set "auto"',
            request.get("tool_choice") not in (None, "auto"),
        ),
        (
            f"a call asks for the response_format {shown(kind)}: leave it out",
            kind not in (None, "text"),
        ),
        ("a call asks for logprobs: leave them out", bool(request.get("logprobs"))),
        ("a call passes `functions`: use `tools`", bool(request.get("functions"))),
    ]


def plain_messages(messages: Any) -> list[Fields]:
    """Return messages in the form in which they are compared. Raises UserFault unless they are a
    list of objects with a role."""
    if not isinstance(messages, (list, tuple)):
        raise UserFault(f"a call has the messages {shown(messages)}: pass a list")
    return [_plain(number, message) for number, message in enumerate(messages, 1)]


def added_messages(
    history: Sequence[Fields], messages: Sequence[Fields], call: int
) -> list[dict[str, str]]:
    """Return the messages that a call adds to the conversation so far.

    `call`: its number, from 1. The first call adds none. Raises UserFault if the call changes the
    conversation, or adds nothing to it later.
    """
    for number, (old, new) in enumerate(zip(history, messages), 1):  # noqa: B905
        if old != new:
            raise UserFault(
                f"call {call} changes message {number} of the conversation from {_shown(old)} to "
                f"{_shown(new)}. {_advice(call)}"
            )
    if len(messages) < len(history):
        raise UserFault(
            f"call {call} has {len(messages)} messages, but the conversation has {len(history)}. "
            f"{_advice(call)}"
        )
    added = list(messages[len(history) :])
    if added and call == 1:
        raise UserFault(f"call 1 adds {_shown(added[0])} to the prompt. {_advice(call)}")
    if call == 1:
        return []
    if not added:
        raise UserFault(f"call {call} adds no message: add what the model shall answer")
    return checked_messages([{"content": "", **one} for one in added])


def assistant_message(text: str, calls: Sequence[Mapping[str, Any]], turn: int) -> Fields:
    """Return a turn as a message: the text before its calls, and the calls. With parsers other than
    `hermes`, there is no text beside calls. Ids follow from the place, so a replay has the same."""
    if not calls:
        return {"role": "assistant", "content": text}
    begin = text.find(OPEN, text.rfind(END_OF_THINKING) + 1)
    return {
        "role": "assistant",
        "content": text[: max(begin, 0)].strip() or None,
        "tool_calls": [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": call["name"], "arguments": _json(call["arguments"])},
            }
            for number, call in enumerate(calls, 1)
        ],
    }


def completion(message: Fields, problem: str | None, turn: int) -> dict[str, Any]:
    """Return the answer to a call. `problem`: why the turn's tool calls cannot be parsed."""
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": reason,
        "logprobs": None,
        "problem": problem,
    }
    return {
        "id": f"chatcmpl-{turn}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": None,
    }


def _plain(number: int, message: Any) -> Fields:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise UserFault(
            f'message {number} of a call is {shown(message)}: write {{"role": "user", "content": '
            '"..."}'
        )
    fields = {**message, "content": _content(message.get("content"))}
    if fields.get("tool_calls"):
        fields["tool_calls"] = [_plain_call(one) for one in fields["tool_calls"]]
    # Clients add empty fields, such as `refusal`.
    return {name: value for name, value in fields.items() if value not in (None, "", [], {})}


def _content(content: Any) -> Any:
    """Return a content as text, if it is a list of texts."""
    if not isinstance(content, (list, tuple)):
        return content
    texts = [one.get("text") for one in content if isinstance(one, Mapping)]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if is_text else content


def _plain_call(call: Any) -> Any:
    """Return a tool call with its arguments as an object, however their JSON is spaced."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    with suppress(TypeError, ValueError, RecursionError):
        arguments = json.loads(arguments)
    return [call.get("id"), function.get("name"), arguments]


def _advice(call: int) -> str:
    if call == 1:
        return (
            "The model has already answered the prompt of the data set: pass task.messages. To "
            "change the prompt, change the data set or data.system_prompt"
        )
    return (
        "The model has read and written these messages: repeat all of them as they were, the "
        "model's own with its tool_calls, and add new ones at the end"
    )


def _shown(message: Fields) -> str:
    known = {name: message[name] for name in ("role", "tool_calls", *TEXTS) if name in message}
    text = _json({**known, **message})
    return as_text(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")


def _names(tools: Any) -> str:
    if not isinstance(tools, (list, tuple)):
        return shown(tools)
    named = [one.get("function", one) if isinstance(one, Mapping) else one for one in tools]
    names = [one.get("name") if isinstance(one, Mapping) else shown(one) for one in named]
    return ", ".join(map(str, names)) or "none"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
