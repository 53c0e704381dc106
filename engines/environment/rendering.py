r"""Tokens to add to a conversation after a turn that the policy sampled, and the text of a turn.

    prompt     ...<|im_start|>assistant\n
    sampled    6*7 is 42.<|im_end|>
    observed   \n<|im_start|>tool\n...<|im_end|>\n<|im_start|>assistant\n    observation_tokens

Sampled tokens are never tokenised again. The chat template sees a mark in place of the turn, and
marks in place of what the environment wrote (frames.py). So control tokens come from the template
only (encoding.py).
"""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

from refrain.engines.data.messages import template_arguments
from refrain.engines.data.template import StoppedTemplate, templates
from refrain.engines.environment.encoding import PlainEncoder
from refrain.engines.environment.frames import (
    FramePart,
    Marks,
    Part,
    Shape,
    Slot,
    advice,
    conversation,
    frame_parts,
    roles_of,
    shape_of,
    without_end,
)
from refrain.engines.environment.observations import check_messages, fitted

MAX_SHAPES = 256
"""Most frames kept. Each has its own roles."""


class TurnRenderer:
    """Renderer of one model's turns. It may be used by several threads."""

    def __init__(
        self,
        tokenizer: Any,
        template_arguments: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        date: datetime | None = None,
    ) -> None:
        """`template_arguments`: `data.template_arguments`. `tools`: JSON schemas of the tools,
        which the first prompt has too. `date`: current time for the template; None: the clock's.

        Raises ValueError for a tokenizer or a template that cannot go on after a turn.
        """
        self._tokenizer = tokenizer
        self._arguments = {**template_arguments, **({"tools": list(tools)} if tools else {})}
        self._date = date
        arguments = self._request([], generates=True)
        self._marks = Marks(_stem(arguments))
        self._encoder = PlainEncoder(tokenizer, arguments["chat_template"])
        self._parts = lru_cache(MAX_SHAPES)(self._read_parts)
        self._special = {
            id: one.content for id, one in tokenizer.added_tokens_decoder.items() if one.special
        }
        self._closing = self._encoder.parts(self._after_turn((), generates=False))

    def observation_tokens(
        self,
        messages: Sequence[Mapping[str, str]],
        ended_by: int | None,
        max_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Return the tokens that follow a sampled turn, up to and with the generation prompt.

        `messages`: of the environment, with the roles user, tool or system. `ended_by`: the end
        token that the policy sampled; None: it sampled none. `max_tokens`: cut contents so that
        there are at most so many. Raises ValueError, or `StoppedTemplate` for a template that takes
        too long.
        """
        check_messages(messages)
        parts = without_end(self._parts(shape_of(messages)), self._closing, ended_by)
        encode = partial(self._encoded, parts, messages, follows_text=ended_by is None)
        contents = [message["content"] for message in messages]
        if max_tokens is None:
            return tuple(encode(contents))
        return tuple(fitted(contents, max_tokens, encode, self._encoder.starts))

    def check(self, messages: Sequence[Mapping[str, str]]) -> None:
        """Raise ValueError if the template or the tokenizer cannot write the frame of messages."""
        self.observation_tokens(messages, None)
        shape = shape_of(messages)
        texts = [part for part in self._parts(shape) if isinstance(part, str)]
        if not all(map(self._encoder.knows, texts)):
            raise ValueError(
                f"the chat template writes a conversation of {roles_of(shape)} with characters "
                f"that the tokenizer does not know. {advice(shape)}"
            )

    def shows_tools(self) -> bool:
        """Return whether the chat template describes the tools in the first prompt. Otherwise the
        prompt has to."""
        without = {name: one for name, one in self._arguments.items() if name != "tools"}
        return self._prompt(self._arguments) != self._prompt(without)

    def text_of(
        self,
        token_ids: Sequence[int],
        end_token_ids: Collection[int],
        tags: Collection[str],
    ) -> str:
        """Return a turn's text without its end token and without special tokens.

        `tags`: special tokens that stay, because the parser of tool calls looks for them.
        """
        if token_ids and token_ids[-1] in end_token_ids:
            token_ids = token_ids[:-1]
        kept = [id for id in token_ids if id not in self._special or self._special[id] in tags]
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def _read_parts(self, shape: Shape) -> tuple[FramePart, ...]:
        """Return what follows a turn: control tokens, text and slots."""
        parts = frame_parts(shape, self._marks, partial(self._after_turn, shape))
        return tuple(piece for part in parts for piece in self._pieces(part))

    def _pieces(self, part: Part) -> Sequence[FramePart]:
        return [part] if isinstance(part, Slot) else self._encoder.parts(part)

    def _after_turn(
        self, shape: Shape, mark: Callable[[int], str] = str, *, generates: bool = True
    ) -> str:
        """Return the template's text after the policy's turn."""
        messages = conversation(shape, self._marks.turn(), mark)
        arguments = self._request(messages, generates=generates)
        try:
            text = templates.text(arguments, self._date)
        except StoppedTemplate:
            raise
        except Exception as error:  # A template may raise anything.
            raise ValueError(
                f"the chat template refuses a conversation of {roles_of(shape)}: {error}. "
                f"{advice(shape)}"
            ) from error
        return self._marks.after_turn(text)

    def _request(self, messages: list[dict[str, Any]], *, generates: bool) -> dict[str, Any]:
        arguments = template_arguments(messages, self._tokenizer, self._arguments)
        return {**arguments, "add_generation_prompt": generates}

    def _prompt(self, arguments: Mapping[str, Any]) -> str:
        messages = [{"role": "user", "content": "?"}]
        return templates.text(template_arguments(messages, self._tokenizer, arguments), self._date)

    def _encoded(
        self,
        parts: Sequence[FramePart],
        messages: Sequence[Mapping[str, str]],
        contents: Sequence[str],
        *,
        follows_text: bool,
    ) -> list[int]:
        """Return the tokens of parts with these contents in place of the messages' own."""
        tokens: list[int] = []
        text = ""
        for part in parts:
            match part:
                case int():
                    tokens += [*self._plain(text, tokens, follows_text), part]
                    text = ""
                case Slot(index, "content", change):
                    text += change(contents[index])
                case Slot(index, field, change):
                    text += change(messages[index][field])
                case str():
                    text += part
        return tokens + self._plain(text, tokens, follows_text)

    def _plain(self, text: str, before: Sequence[int], follows_text: bool) -> list[int]:
        """Return the tokens of text after these tokens, which follow the sampled turn."""
        if not text:
            return []
        return self._encoder.encode(text, after_token=bool(before) or not follows_text)


def check(renderer: TurnRenderer, role: str) -> None:
    """Raise ValueError if the chat template cannot render messages of a role after a turn.

    `role`: `tool` if the environment has tools, otherwise `user`.
    """
    for number in (1, 2) if role == "tool" else (1,):
        renderer.check([{"role": role, "content": ""}] * number)


def _stem(arguments: Mapping[str, Any]) -> str:
    """Return letters and digits that occur nowhere in these arguments of a template."""
    content = json.dumps(arguments, sort_keys=True, default=str).encode()
    return f"m{hashlib.blake2b(content, digest_size=12).hexdigest()}"
