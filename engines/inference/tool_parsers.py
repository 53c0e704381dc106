"""Parsers of tool calls that vLLM has for many models, for environments."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from refrain.engines.environment.hermes import Malformed, Parser, checked_call
from refrain.schemas.environment import TurnText

END_OF_THINKING = "</think>"


def check_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if vLLM has no parser of this name, or it cannot be used here."""
    open_parser(name, tokenizer, tools)


def open_parser(name: str, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> Parser:
    """Return vLLM's parser of this name. The import of vLLM takes several seconds.

    Raises ValueError for an unknown name, and for a tokenizer that lacks the parser's tokens.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    names = ToolParserManager.list_registered()
    if name not in names:
        raise ValueError(
            f"environment.parser {name} is unknown: set `hermes`, or a parser of vLLM "
            f"({', '.join(names)})"
        )
    try:
        request = ChatCompletionRequest(messages=[], tools=list(tools) or None)
        declared: Any = request.tools
        parser = ToolParserManager.get_tool_parser(name)(tokenizer, declared)
    except Exception as error:  # Each parser raises errors of its own.
        raise ValueError(
            f"environment.parser {name} cannot be used with this model: {error}"
        ) from error
    special = [one.content for one in tokenizer.added_tokens_decoder.values() if one.special]
    return Parser(frozenset(special), partial(parse, parser, request))


def parse(parser: Any, request: Any, text: str, max_calls: int) -> TurnText:
    """Return a turn with its tool calls. Calls in thinking are ignored.

    vLLM's parsers take calls that they cannot read as text, so such a turn has no calls.
    """
    answer = text.rpartition(END_OF_THINKING)[2].strip()
    try:
        found = parser.extract_tool_calls(answer, request).tool_calls
    except Exception as error:  # Each parser raises errors of its own.
        return TurnText(text, problem=f"The tool calls cannot be read: {error}.")
    if len(found) > max_calls:
        return TurnText(text, problem=f"You made over {max_calls} tool calls in one turn.")
    try:
        calls = [
            checked_call(call.function.model_dump(), f"Tool call {number}")
            for number, call in enumerate(found, 1)
        ]
    except Malformed as problem:
        return TurnText(text, problem=str(problem))
    return TurnText(text, tuple(calls))
