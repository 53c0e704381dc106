"""The parser finds the calls that a model made, and explains each one that it cannot read."""

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refrain.engines.environment.hermes import MAX_DEPTH, TAGS, parse
from refrain.schemas.environment import ToolCall, TurnText

ADD = ToolCall("add", {"a": 1, "b": 2})
SAY = ToolCall("say", {"text": "</tool_call> and </think> are tags"})
LEVELS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(
    st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), LEVELS, max_size=3)),
    max_size=4,
)


def written(call: ToolCall, *, indent: int | None = None) -> str:
    content = {"name": call.name, "arguments": call.arguments}
    return f"<tool_call>\n{json.dumps(content, indent=indent)}\n</tool_call>"


def tagged(content: str) -> str:
    return f"<tool_call>{content}</tool_call>"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("", ()),
        ("The answer is 3.", ()),
        (written(ADD), (ADD,)),
        (f"First.\n{written(ADD)}\nThen.{written(SAY)} Done.", (ADD, SAY)),
        (written(ADD, indent=4), (ADD,)),
        (tagged('{"arguments": {"a": 1, "b": 2}, "name": "add", "id": 7}'), (ADD,)),
        (tagged(r'{"name": "add", "arguments": "{\"a\": 1, \"b\": 2}"}'), (ADD,)),
        (tagged('{"name": "now"}'), (ToolCall("now", {}),)),
        (tagged('{"name": "now", "arguments": null}'), (ToolCall("now", {}),)),
        (tagged('{"name": "run", "arguments": {"code": "a\n\tb"}}'),
         (ToolCall("run", {"code": "a\n\tb"}),)),
        (f"<think>I may {written(ADD)}</think>{written(SAY)}", (SAY,)),
        (f"<think>I write <tool_call>, or </tool_call>.</think>{written(ADD)}", (ADD,)),
        # The prompt ended with `<think>`.
        (f"I may {written(SAY)}.</think>\n{written(ADD)}", (ADD,)),
        (f"I write <tool_call> or </tool_call>.</think>\n{written(ADD)}", (ADD,)),
        ("I write <tool_call>.</think>\n3", ()),
        (f"{written(SAY)}{written(ADD)}", (SAY, ADD)),
        (f"{written(ADD)}<think>Once more? {written(ADD)}</think>", (ADD,)),
        ("<think>It never ends", ()),
        ("a < b, <b>bold</b>, <tool_calls>, <|im_end|>", ()),
    ],
)  # fmt: skip
def test_calls_are_found(text: str, calls: tuple[ToolCall, ...]) -> None:
    assert parse(text, 8) == TurnText(text, calls)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>", "Tool call 1 is not valid JSON: Expecting value at character 1. Write <to"),
        (tagged("add(1, 2)"), "Tool call 1 is not valid JSON: Expecting value at character 1"),
        (tagged('\n {"name": "add", }'), "not valid JSON: .* at character 17"),
        (tagged("{'name': 'add'}"), "in double quotes at character 2"),
        (written(ADD) + tagged("{}"), 'Tool call 2 has no "name". Give the name of a tool'),
        (tagged('{"name": 3}'), 'has no "name"'),
        (tagged('{"name": ""}'), 'has no "name"'),
        (tagged("[1]"), "Tool call 1 is not a JSON object"),
        (tagged('{"name": "add", "arguments": [1, 2]}'), "are not a JSON object"),
        (tagged('{"name": "add", "arguments": "1, 2"}'), "are not valid JSON: Extra data"),
        (tagged('{"name": "add", "arguments": "3"}'), "are not a JSON object"),
        (tagged('{"name": "add", "arguments": {"a": NaN}}'), "NaN is not a number of JSON"),
        (tagged('{"name": "add", "arguments": {"a": -Infinity}}'), "-Infinity is not a number"),
        (tagged('{"name": "add", "arguments": {"a": 1e999}}'), "a number is too large"),
        (tagged(f'{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}'), "over 100 digits"),
        (tagged(r'{"name": "say", "arguments": {"a": "\ud800"}}'), "half of a surrogate pair"),
        (tagged(r'{"name": "\udc00"}'), "half of a surrogate pair"),
        ('<tool_call>{"name": "now"}', "Tool call 1 is not closed. Write </tool_call> right after"),
        ('<tool_call>{"name": "now"} now</tool_call>', "Tool call 1 is not closed"),
        ('{"name": "now"}</tool_call>', "There is a </tool_call> without <tool_call>"),
        (f"<think>So {written(ADD)}", "Write </think> before you call a tool"),
        (written(ADD) * 9, "You made over 8 tool calls in one turn. Make fewer."),
        (f"Hm.</think><tool_call>{written(ADD)}", "Tool call 1 is not valid JSON"),
        (f"<think>Hm.</think><tool_call></think>{written(ADD)}", "Tool call 1 is not valid JSON"),
    ],
)
def test_problems_are_explained_and_nothing_is_executed(text: str, problem: str) -> None:
    turn = parse(text, 8)
    assert turn.calls == ()
    assert turn.text == text
    assert turn.problem
    assert re.search(problem, turn.problem)
    assert len(turn.problem) < 300
    assert turn.problem.endswith(".")


def test_as_many_calls_as_allowed_are_fine() -> None:
    assert parse(written(ADD) * 8, 8).calls == (ADD,) * 8
    assert parse(written(ADD), 0).problem
    assert parse("no call", 0).problem is None


@pytest.mark.parametrize("depth", [MAX_DEPTH, 10**5])
@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("brackets", ["[]", ('{"a":', "}")])
def test_deep_nesting_is_a_problem(depth: int, as_text: bool, brackets: Any) -> None:
    opening, closing = brackets
    value = f'{{"a": {opening * (depth - 1)}1{closing * (depth - 1)}}}'
    turn = parse(tagged(f'{{"name": "f", "arguments": {json.dumps(value) if as_text else value}}}'),
                 8)  # fmt: skip
    assert bool(turn.problem) == (depth > MAX_DEPTH)
    if turn.problem:
        assert turn.problem == "Tool call 1 has over 32 levels of lists and objects. Use fewer."


def test_one_level_more_is_a_problem() -> None:
    value = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse(tagged(f'{{"name": "f", "arguments": {{"a": {value}}}}}'), 8).problem


HOSTILE = {
    "opening tags": "<tool_call>",
    "closing tags": "</tool_call>",
    "opening thinking": "<think>",
    "closing thinking": "</think>",
    "thoughts": "<think></think>",
    "calls between thoughts": "<tool_call></think>",
    "open strings": '<tool_call>{"a',
    "open values": '<tool_call>{"a":"',
    "escapes": r'<tool_call>["\"',
    "objects": '<tool_call>{"name": "f"}',
    "calls": '<tool_call>{"name": "f"}</tool_call>',
    "calls and thinking": '<tool_call>{"name": "f"}</tool_call></think>',
    "spaces": "<tool_call>          ",
    "spaces after a call": '<tool_call>{"name": "f"}          ',
    "brackets": "[",
    "braces": '{"a":',
}


def parsing_s(text: str) -> float:
    began_s = time.process_time()
    parse(text, 10**9)
    return time.process_time() - began_s


@pytest.mark.parametrize("start", ["", "<tool_call>", "<tool_call>[", '<tool_call>{"name": "'])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_text_takes_linear_time(kind: str, start: str) -> None:
    """A second is 20 times as long as the slowest takes. Quadratic time would be minutes."""
    text = (start + HOSTILE[kind] * (2**20 // len(HOSTILE[kind])))[: 2**20]
    assert parsing_s(text) < 1


@given(st.lists(st.sampled_from([*TAGS, *'{}[]":, \\', '"name"', '"arguments"', "a", "1", "é"])))
def test_no_text_raises_and_only_problems_have_no_calls(pieces: list[str]) -> None:
    turn = parse("".join(pieces), 2)
    assert len(turn.calls) <= 2
    assert not (turn.calls and turn.problem)


@given(CALLS, st.booleans(), st.text().filter(lambda text: "<" not in text))
def test_all_written_calls_are_read(calls: list[ToolCall], ascii: bool, between: str) -> None:
    text = between.join(
        tagged(json.dumps({"name": one.name, "arguments": one.arguments}, ensure_ascii=ascii))
        for one in calls
    )
    text = f"<think>{between}</think>{text}"
    assert parse(text, 4).calls == tuple(calls)
