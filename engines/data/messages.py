"""Tokenise a row's messages with the model's chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from refrain.engines.data.repeats import shown
from refrain.engines.data.template import StoppedTemplate, templates


class BadRowError(ValueError):
    """Fault of a row. The message says how to fix it."""


@dataclass(frozen=True)
class PromptSettings:
    """Settings that turn a file's rows into prompts."""

    system_prompt: str | None = None
    """System message for rows that have none."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    drops_overlong: bool = False
    """Whether to leave out rows that are too long. Otherwise they raise an error."""
    date: datetime | None = None
    """Current time for the chat template. None: the clock's."""


AS_THEY_ARE = PromptSettings()


def messages_of(row: Mapping[str, Any], settings: PromptSettings) -> list[dict[str, Any]]:
    """Return the messages of a row, the system message first. Raises BadRowError."""
    messages = row.get("prompt")
    if messages is None:
        raise BadRowError(
            "no `prompt`: add a list of {role, content} messages, or convert the file with "
            "`refrain data` (gsm8k, math, or columns that you name)"
        )
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise BadRowError(
            f"`prompt` is {shown(messages)}: make it a list of messages such as "
            '[{"role": "user", "content": "..."}]'
        )
    if settings.system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": settings.system_prompt}, *messages]


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(
        isinstance(message.get(name), str) for name in ("role", "content")
    )


def tokenize(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    arguments: Mapping[str, Any],
    date: datetime | None = None,
) -> tuple[int, ...]:
    """Return the tokens of a prompt with the generation prompt, as `apply_chat_template` does.
    `date`: current time for the template; None: the clock's.

    Raises BadRowError, or `StoppedTemplate` for a template that takes too long.
    """
    try:
        given = template_arguments(messages, tokenizer, arguments)
        token_ids = templates.tokens(given, tokenizer, date)
    except StoppedTemplate:
        raise
    except Exception as error:  # A template may raise anything.
        raise BadRowError(f"the chat template refuses `prompt`: {error}") from error
    if not token_ids:
        raise BadRowError("the chat template makes no tokens of `prompt`: check the messages")
    return tuple(token_ids)


def template_arguments(
    messages: list[dict[str, Any]], tokenizer: Any, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `templates` for a conversation with the generation prompt. Raises
    ValueError when the tokenizer has no chat template."""
    given = dict(arguments)
    template = tokenizer.get_chat_template(given.pop("chat_template", None), given.get("tools"))
    return {
        **tokenizer.special_tokens_map,
        **given,
        "conversations": [messages],
        "chat_template": template,
        "add_generation_prompt": True,
    }
