r"""Frames that a chat template writes around the messages after a turn.

The renderer asks the template for a conversation whose contents are marks:

    user: ?, assistant: MARK, tool: n0n  ─►  ...MARK<|im_end|>\n<|im_start|>tool\nn0n<|im_end|>\n...
                                                     └────────── frame ──────────┘   └─ frame

A second rendering has other contents. It shows whether the template changes them: it may strip them
(Llama 3) or quote them as JSON (Llama 3.1). A frame depends on the roles only, so the template
never sees what an environment wrote.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from refrain.engines.environment.answers import TEXTS

Shape = tuple[tuple[str, tuple[str, ...]], ...]
"""Role and fields of each message."""
TextChange = Callable[[str], str]
"""Function from an environment's text to the template's text."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Place of a message's field in the rendered text."""

    message: int
    """Position of the message, from 0."""
    field: str
    change: TextChange
    """What the template does to the text."""


Part = str | Slot
FramePart = int | str | Slot
"""Control token, template's text or place of an environment's text."""


def _as_it_is(text: str) -> str:
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


CHANGES: tuple[TextChange, ...] = (_as_it_is, str.strip, str.lstrip, str.rstrip, _quoted)


class Marks:
    """Marks of one renderer. They are not in its template and tools, and always the same."""

    def __init__(self, stem: str) -> None:
        """`stem`: letters and digits that occur nowhere else."""
        self._stem = stem

    def turn(self) -> str:
        """Return the mark of the policy's turn."""
        return f"{self._stem}turn"

    def plain(self, number: int) -> str:
        """Return the mark of the slot with this number."""
        return f"{self._stem}n{number}n"

    def odd(self, number: int) -> str:
        """Return a mark that shows what the template changes."""
        mark = self.plain(number)
        return f'\n {mark}"\\\u00e9\n<&>{mark} \n'

    def after_turn(self, text: str) -> str:
        """Return the text after the policy's turn. Raises ValueError unless it is there once."""
        parts = text.split(self.turn())
        if len(parts) != 2:
            raise ValueError(
                f"the chat template writes an assistant message {len(parts) - 1} times instead of "
                "once, so nothing can be added to a turn: use another chat template"
            )
        return parts[1]

    def split(self, text: str) -> list[str]:
        """Return frames and numbers of slots in turns, frames at both ends."""
        return re.split(rf"{self._stem}n(\d+)n", text)


def conversation(shape: Shape, turn: str, mark: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return the messages of a conversation with marks in its fields."""
    numbers = {slot: number for number, slot in enumerate(fields_of(shape))}
    return [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": turn},
        *(
            {"role": role} | {field: mark(numbers[index, field]) for field in fields}
            for index, (role, fields) in enumerate(shape)
        ),
    ]


def fields_of(shape: Shape) -> list[tuple[int, str]]:
    """Return message and field of each slot. Its position is the slot's number."""
    return [(index, field) for index, (_, fields) in enumerate(shape) for field in fields]


def shape_of(messages: Sequence[Mapping[str, str]]) -> Shape:
    """Return the shape of messages."""
    return tuple(
        (message["role"], tuple(field for field in TEXTS if field in message))
        for message in messages
    )


def roles_of(shape: Shape) -> str:
    """Return the roles of the conversation, for a message."""
    return ", ".join(["user", "assistant", *(role for role, _ in shape)])


def advice(shape: Shape) -> str:
    """Return how to avoid what the chat template cannot do."""
    if any(role != "user" for role, _ in shape):
        return "Return messages of the role user, which works with every template"
    if len(shape) > 1:
        return "Return one message instead of several"
    return "Set chat_template in data.template_arguments to one that can"


def frame_parts(
    shape: Shape, marks: Marks, render: Callable[[Callable[[int], str]], str]
) -> list[Part]:
    """Return the template's text for messages after a turn, with slots for their fields.

    `render`: renders the conversation with these marks, and returns the text after the turn. Raises
    ValueError if the template leaves out a content, repeats it or changes it in an unknown way.
    """
    pieces = marks.split(render(marks.plain))
    frames, numbers = pieces[::2], list(map(int, pieces[1::2]))
    slots = fields_of(shape)
    _check_contents(shape, [slots[number] for number in numbers])
    rendered = render(marks.odd)
    changes = _changes(frames, [marks.odd(number) for number in numbers], rendered)
    if changes is None:
        raise ValueError(
            "the chat template changes the content of messages in a way that refrain does not know "
            "(it may strip them or quote them as JSON). It writes "
            f"{rendered[:200]!r}. {advice(shape)}"
        )
    parts: list[Part] = [frames[0]]
    for number, change, frame in zip(numbers, changes, frames[1:], strict=True):
        parts += [Slot(*slots[number], change), frame]
    return parts


def _check_contents(shape: Shape, slots: Sequence[tuple[int, str]]) -> None:
    found = [index for index, field in slots if field == "content"]
    if found != list(range(len(shape))):
        raise ValueError(
            "the chat template leaves out, repeats or reorders messages of a conversation of "
            f"{roles_of(shape)}. {advice(shape)}"
        )


def _changes(frames: Sequence[str], texts: Sequence[str], rendered: str) -> list[TextChange] | None:
    """Return what the template did to each text. None: unknown."""
    changes: list[TextChange] = []
    rest = rendered.removeprefix(frames[0])
    for text, frame in zip(texts, frames[1:], strict=True):
        change = next((one for one in CHANGES if rest.startswith(one(text) + frame)), None)
        if change is None:
            return None
        changes.append(change)
        rest = rest[len(change(text) + frame) :]
    return None if rest else changes


def without_end(
    parts: Sequence[FramePart], closing: Sequence[FramePart], ended_by: int | None
) -> Sequence[FramePart]:
    """Return what follows a turn, without the end of the turn if the policy sampled an end token.

    `closing`: what follows the last turn of a conversation. Usually it ends with the token that the
    policy samples. If the policy sampled another end token, that takes the place of the template's.
    A few templates write no end (GLM): there the next role's token may end a turn.
    """
    if ended_by is None:
        return parts
    if ended_by in closing:
        end = closing.index(ended_by) + 1
        if list(parts[:end]) == list(closing[:end]):
            return parts[end:]
    token = _first_token(parts)
    if token is not None and (token == ended_by or _first_token(closing) is not None):
        return parts[parts.index(token) + 1 :]
    return parts


def _first_token(parts: Sequence[FramePart]) -> int | None:
    """Return the control token with which parts begin, after empty space."""
    for part in parts:
        if isinstance(part, int):
            return part
        if isinstance(part, Slot) or not part.isspace():
            break
    return None
