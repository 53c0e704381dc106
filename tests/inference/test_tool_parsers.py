"""vLLM's parsers find the calls of other models than Hermes' and Qwen's."""

from functools import cache
from typing import Any

import pytest

from refrain.engines.environment import hermes
from refrain.engines.environment.hermes import Parser
from refrain.engines.inference.tool_parsers import check_parser, open_parser
from refrain.schemas.environment import ToolCall
from tests.environment.models import tokenizer_of
from tests.tasks.test_environments import CLASS, TOOLS_OF_CLASS, config_of, read, written

pytestmark = pytest.mark.engine
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Product of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
CALL = ToolCall("multiply", {"a": 6, "b": 7})
OTHER = ToolCall("multiply", {"a": 1, "b": 2})
JSON = '{"name": "multiply", "%s": {"a": 6, "b": 7}}'
XML = (
    "<tool_call>\n<function=multiply>\n<parameter=a>\n6\n</parameter>\n<parameter=b>\n7\n"
    "</parameter>\n</function>\n</tool_call>"
)
TEXTS = {
    "hermes": f"<tool_call>{JSON % 'arguments'}</tool_call>",
    "llama3_json": f"<|python_tag|>{JSON % 'parameters'}",
    "pythonic": "[multiply(a=6, b=7)]",
    "qwen3_coder": XML,
}


@cache
def parser_of(name: str) -> Parser:
    return open_parser(name, tokenizer(), TOOLS)


@cache
def tokenizer() -> Any:
    found = tokenizer_of("hermes-special-tags")
    found.add_special_tokens({"additional_special_tokens": ["<|python_tag|>"]})
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_a_call_is_found_each_time(name: str) -> None:
    parser = parser_of(name)
    for _ in range(2):
        turn = parser.parse(TEXTS[name], 1)
        assert (turn.calls, turn.problem, turn.text) == ((CALL,), None, TEXTS[name])
        assert parser.parse("It is 42.", 1).calls == ()


@pytest.mark.parametrize("name", TEXTS)
def test_calls_in_thinking_are_ignored(name: str) -> None:
    thinking = f"<think>Should I write {TEXTS['pythonic']}?</think>"
    assert parser_of(name).parse(f"{thinking}\n\n{TEXTS[name]}", 1).calls == (CALL,)
    assert parser_of(name).parse(f"<think>{TEXTS[name]}</think>\n\n42", 1).calls == ()


def test_too_many_calls_are_a_problem() -> None:
    text = "[multiply(a=6, b=7), multiply(a=1, b=2)]"
    assert parser_of("pythonic").parse(text, 2).calls == (CALL, OTHER)
    turn = parser_of("pythonic").parse(text, 1)
    assert (turn.calls, turn.problem) == ((), "You made over 1 tool calls in one turn.")


def test_arguments_are_checked_as_those_of_hermes() -> None:
    text = '<|python_tag|>{"name": "multiply", "parameters": [6, 7]}'
    assert "not a JSON object" in (parser_of("llama3_json").parse(text, 1).problem or "")


def test_tags_of_a_parser_stay_in_the_text() -> None:
    assert "<|python_tag|>" in parser_of("llama3_json").tags
    assert hermes.HERMES.tags == hermes.TAGS


def test_an_unknown_name_and_a_tokenizer_without_the_tags_are_refused() -> None:
    with pytest.raises(ValueError, match=r"environment\.parser lama is unknown: set `hermes`"):
        check_parser("lama", tokenizer(), TOOLS)
    with pytest.raises(ValueError, match=r"llama3_json cannot be used .*<\|python_tag\|>"):
        check_parser("llama3_json", tokenizer_of("chatml"), TOOLS)


def test_a_parser_that_cannot_be_used_is_refused_before_the_start(tmp_path: Any) -> None:
    config = config_of(written(tmp_path, CLASS + TOOLS_OF_CLASS))
    assert config.environment
    environment = config.environment.model_copy(update={"parser": "llama3_json"})
    with pytest.raises(ValueError, match="llama3_json cannot be used with this model"):
        read(config.model_copy(update={"environment": environment}))
