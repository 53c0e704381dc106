"""A row's messages as the tokens of a prompt, by the model's chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from engines.data.repeats import shown
from engines.data.template import StoppedTemplate, templates


class BadRowError(ValueError):
    """Fault of a row, and how to mend it."""


@dataclass(frozen=True)
class PromptSettings:
    """How prompts are made of a file's rows, and which of them are used."""

    system_prompt: str | None = None
    """Message before those of a row that has none of the role `system`."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    drops_overlong: bool = False
    """Leave out rows that are too long, which are refused otherwise."""
    max_prompts: int | None = None
    """Prompts used, the first ones; None: all."""
    date: datetime | None = None
    """Time that the chat template sees; None: the clock's."""


AS_THEY_ARE = PromptSettings()


def messages_of(row: Mapping[str, Any], settings: PromptSettings) -> list[dict[str, Any]]:
    """Messages of a row, the system's first. Raises BadRowError."""
    messages = row.get("prompt")
    if messages is None:
        raise BadRowError(
            "no `prompt`: add a list of {role, content} messages, or have `refrain data` make "
            "veRL's rows of it (gsm8k, math, or columns that you name)"
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
    """Tokens of a prompt, the beginning of the answer included, as by `apply_chat_template` at this
    date; None: now.

    Raises BadRowError, and `StoppedTemplate` for a template that takes too long.
    """
    given = dict(arguments)
    try:
        template = tokenizer.get_chat_template(given.pop("chat_template", None), given.get("tools"))
        token_ids = templates.tokens(
            {
                **tokenizer.special_tokens_map,
                **given,
                "conversations": [messages],
                "chat_template": template,
                "add_generation_prompt": True,
            },
            tokenizer,
            date,
        )
    except StoppedTemplate:
        raise
    except Exception as error:  # The model's template decides which.
        raise BadRowError(f"the chat template refuses `prompt`: {error}") from error
    if not token_ids:
        raise BadRowError("the chat template makes no tokens of `prompt`: check the messages")
    return tuple(token_ids)
