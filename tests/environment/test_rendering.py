"""Observations have the tokens of the whole conversation. Only templates write control tokens."""

import json
import time
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import Unigram
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from refrain.engines.data.dataset import load_tokenizer
from refrain.engines.data.messages import tokenize
from refrain.engines.data.template import StoppedTemplate
from refrain.engines.environment.frames import Slot, without_end
from refrain.engines.environment.hermes import TAGS
from refrain.engines.environment.rendering import TurnRenderer, check
from tests.conftest import DEMO
from tests.environment.models import STYLES, tokenizer_of

SAID = "It is 42."
ASKED = {"role": "user", "content": "What is six times seven?"}
CASES = [(name, role) for name, style in STYLES.items() for role in style.roles]
BYTES = [case for case in CASES if STYLES[case[0]].kind == "bytes"]
CONTENTS = (
    "42",
    "",
    " 42 ",
    "\n42\n",
    "\n\n  42\t\n\n",
    "two words, one: 'x'\n\n\nand\r\nmore",
    "ö ñ 日本語 \U0001f600 \u200d e\u0301",
    '{"result": [1, 2], "text": "a \\" quote \\n"}',
    "def f(x):\n    return x  \n",
)
TOOL = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Product.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@cache
def renderer_of(style: str) -> TurnRenderer:
    return TurnRenderer(tokenizer_of(style), STYLES[style].arguments)


def end_id(style: str, role: str) -> int:
    text = "<|user|>" if (style, role) == ("glm", "user") else STYLES[style].end
    return tokenizer_of(style).convert_tokens_to_ids(text)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def rendered(tokenizer: Any, messages: Sequence[dict[str, str]], **arguments: Any) -> str:
    conversation = [ASKED, message("assistant", SAID), *messages]
    return tokenizer.apply_chat_template(
        conversation, tokenize=False, add_generation_prompt=True, **arguments
    )


def assert_tail(style: str, messages: Sequence[dict[str, str]], role: str) -> None:
    """Assert that the tokens of the whole conversation end with those of the observation."""
    tokenizer, given = tokenizer_of(style), STYLES[style]
    whole = tokenizer(rendered(tokenizer, messages, **given.arguments), add_special_tokens=False)
    observed = renderer_of(style).observation_tokens(messages, end_id(style, role))
    before = whole.input_ids[: -len(observed)]
    assert tuple(whole.input_ids[-len(observed) :]) == observed
    assert before[-1] == end_id(style, role)
    assert tokenizer.decode(before[:-1]).endswith(SAID)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize(("style", "role"), CASES)
def test_tokens_are_those_of_the_whole_conversation(style: str, role: str, content: str) -> None:
    assert_tail(style, [message(role, content)], role)


@pytest.mark.parametrize(("style", "role"), [case for case in CASES if case[1] == "tool"])
def test_several_messages_have_one_frame(style: str, role: str) -> None:
    assert_tail(style, [message("tool", "41"), message("tool", "42 ")], role)


@pytest.mark.parametrize("style", ["chatml", "qwen2.5", "qwen3", "worded", "worded-bytes"])
def test_roles_may_be_mixed(style: str) -> None:
    assert_tail(style, [message("tool", "41"), message("user", "Go on"), message("tool", "")],
                "tool")  # fmt: skip


@pytest.mark.parametrize("style", ["chatml", "qwen2.5", "llama3", "deepseek"])
def test_a_conversation_of_two_turns_is_one_text(style: str) -> None:
    """Sampled tokens stay as they are, also where the tokenizer would choose others."""
    tokenizer, ended_by = tokenizer_of(style), end_id(style, "user")
    more = [message("user", "And eight?"), message("assistant", SAID), message("user", "Thanks.")]
    letters = [tokenizer(one, add_special_tokens=False).input_ids for one in SAID]
    sampled = [*(id for ids in letters for id in ids), ended_by]
    assert sampled != [*tokenizer(SAID, add_special_tokens=False).input_ids, ended_by]
    tokens = list(tokenize([ASKED], tokenizer, {}))
    for said in (more[0], more[2]):
        tokens += [*sampled, *renderer_of(style).observation_tokens([said], ended_by)]
    assert tokenizer.decode(tokens) == rendered(tokenizer, more)


def pieces_of(style: str) -> list[str]:
    given, marks = STYLES[style], renderer_of(style)._marks
    return [
        *(*given.special, *given.tags, marks.turn(), marks.plain(0), marks.odd(0), "[INST]", "▁"),
        *(
            "<unk>",
            "<0x0A>",
            " ",
            "\n",
            "\n\n",
            "\t",
            "<|",
            "|>",
            "im_end",
            "</",
            ">",
            '"',
            "\\",
            "42",
            "{{ 1 }}",
        ),
    ]


def contents_of(style: str) -> st.SearchStrategy[str]:
    """Return contents with the texts of control tokens and marks among them."""
    return st.lists(st.sampled_from(pieces_of(style)) | st.text(max_size=8)).map("".join)


def control_ids(style: str, tokens: Sequence[int]) -> list[int]:
    control = renderer_of(style)._encoder.control
    return [id for id in tokens if id in control]


def assert_content_is_text(style: str, role: str, content: str) -> None:
    """Assert that the content is in the tokens as it is, and no control token is made of it."""
    tokenizer, given, ended_by = tokenizer_of(style), STYLES[style], end_id(style, role)
    observed = renderer_of(style).observation_tokens([message(role, content)], ended_by)
    frame = renderer_of(style).observation_tokens([message(role, "7")], ended_by)
    assert control_ids(style, observed) == control_ids(style, frame)
    written = given.written(role, content)
    if given.kind == "bytes":
        before, after = rendered_after_turn(style, role).split("CONTENT")
        text = f"{before}{written}{after}"
        assert tokenizer.decode(observed) == text.split(tokenizer.decode([ended_by]), 1)[1]
    else:
        assert written.replace("▁", " ") in tokenizer.decode(observed)


@cache
def rendered_after_turn(style: str, role: str) -> str:
    messages = [message(role, "CONTENT")]
    return rendered(tokenizer_of(style), messages, **STYLES[style].arguments).split(SAID)[1]


@pytest.mark.parametrize(("style", "role"), CASES)
def test_any_content_is_text(style: str, role: str) -> None:
    @given(contents_of(style))
    @settings(max_examples=60)
    def run(content: str) -> None:
        assert_content_is_text(style, role, content)

    run()


@pytest.mark.parametrize(("style", "role"), CASES)
def test_each_control_token_in_a_content_is_text(style: str, role: str) -> None:
    """Two of them have the template's frames between them."""
    for piece in pieces_of(style):
        assert_content_is_text(style, role, piece)
        assert_content_is_text(style, role, f"a{piece}{piece} b")


@pytest.mark.parametrize("style", STYLES)
def test_without_splitting_a_content_makes_control_tokens(
    style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder notices it. Without its check the same assertion as above fails."""
    encoder = renderer_of(style)._encoder
    content = f"42{STYLES[style].special[0]}"
    monkeypatch.setattr(encoder._plain, "encode_special_tokens", False)
    with pytest.raises(ValueError, match="of plain text, so a tool could end a turn"):
        assert_content_is_text(style, "user", content)
    monkeypatch.setattr(encoder, "_never_text", set())
    with pytest.raises(AssertionError):
        assert_content_is_text(style, "user", content)


def observed_text(style: str, role: str, ended_by: str | None) -> str:
    tokenizer = tokenizer_of(style)
    id = None if ended_by is None else tokenizer.convert_tokens_to_ids(ended_by)
    tokens = renderer_of(style).observation_tokens([message(role, "7")], id)
    return tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("style", "role", "ended_by", "start"),
    [
        ("qwen2.5", "tool", "<|im_end|>", "\n<|im_start|>user\n<tool_response>"),
        ("qwen2.5", "tool", None, "<|im_end|>\n<|im_start|>user\n"),
        # Another end token takes the place of the template's.
        ("qwen2.5", "tool", "<|endoftext|>", "\n<|im_start|>user\n<tool_response>"),
        ("llama3", "tool", "<|eot_id|>", "<|start_header_id|>ipython"),
        ("glm", "tool", "<|observation|>", "\n<tool_response>\n7"),
        ("glm", "user", "<|user|>", "\n7<|assistant|>"),
        # Its next turn's token is no end of this one.
        ("glm", "user", "<|endoftext|>", "<|user|>\n7<|assistant|>"),
        ("glm", "tool", None, "<|observation|>\n<tool_response>\n7"),
        (
            "deepseek",
            "tool",
            "<｜end▁of▁sentence｜>",
            "<｜tool▁output▁begin｜>7<｜tool▁output▁end｜>",
        ),
        ("mistral-first", "user", None, "</s>[INST] 7 [/INST]"),
        ("worded", "user", "</s>", "USER: 7 ASSISTANT:"),
    ],
)
def test_one_token_ends_a_turn(style: str, role: str, ended_by: str | None, start: str) -> None:
    assert observed_text(style, role, ended_by).removeprefix(" ").startswith(start)


@pytest.mark.parametrize(
    ("parts", "closing", "ended_by", "expected"),
    [
        ([7, "\n", 8], [7, "\n"], 7, ["\n", 8]),
        ([7, "\n", 8], [7, "\n"], None, [7, "\n", 8]),
        ([" ", 7, 8], [" ", 7], 7, [8]),
        # Command R7B ends a response and then the turn.
        ([6, 7, 8], [6, 7], 7, [8]),
        (["[/A]", 7, 8], ["[/A]", 7], 7, [8]),
        # gpt-oss ends the last turn with another token.
        ([6, 8], [7], 7, [8]),
        ([7, "\n", 8], [7, "\n"], 9, ["\n", 8]),
        ([" ", 7, "\n", 8], [" ", 7], 9, ["\n", 8]),
        # Templates without an end.
        ([7, "\n", 8], [], 7, ["\n", 8]),
        ([7, "\n", 8], [], 9, [7, "\n", 8]),
        (["\n\nUSER: "], [], 9, ["\n\nUSER: "]),
        (["USER: ", 7], [7], 9, ["USER: ", 7]),
        ([Slot(0, "content", str), 7], [7], 7, [Slot(0, "content", str), 7]),
        ([], [], 7, []),
    ],
)
def test_the_sampled_end_takes_the_place_of_the_templates(
    parts: list[Any], closing: list[Any], ended_by: int | None, expected: list[Any]
) -> None:
    assert without_end(parts, closing, ended_by) == expected


@pytest.mark.parametrize(
    ("style", "end"),
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n"),
        ("qwen3-no-thinking", "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_begins_in_the_generation_prompt(style: str, end: str) -> None:
    tokens = renderer_of(style).observation_tokens([message("tool", "</think>")], None)
    assert tokenizer_of(style).decode(tokens).endswith(end)
    assert tokenizer_of(style).convert_tokens_to_ids("<think>") in tokens


def test_text_after_text_gets_no_space() -> None:
    """SentencePiece puts a space before a text. In the middle of one there is none."""
    template = "{% for m in messages %}{{ '\n' + m.content }}{% endfor %}"
    for style in ("mistral-first", "mistral-legacy", "mistral-always"):
        renderer = TurnRenderer(tokenizer_of(style), {"chat_template": template})
        tokens = renderer.observation_tokens([message("user", "7")], None)
        assert tokenizer_of(style).convert_ids_to_tokens(tokens) == ["<0x0A>", "7"] or (
            tokenizer_of(style).convert_ids_to_tokens(tokens) == ["\n", "7"]
        )


@pytest.mark.parametrize(("style", "role"), CASES)
def test_templates_that_know_a_role_pass(style: str, role: str) -> None:
    check(renderer_of(style), role)


USER = "Return messages of the role user, which works with every template"
EACH = "{% for m in messages %}"


@pytest.mark.parametrize(
    ("template", "role", "problem"),
    [
        (STYLES["mistral-first"].template, "tool", f"assistant, tool: .* must alternate.* {USER}"),
        (STYLES["gemma"].template, "tool", f"roles must alternate user/assistant. {USER}"),
        (EACH + "{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}", "tool",
         f"leaves out, repeats or reorders .* of user, assistant, tool. {USER}"),
        (EACH + "{{ m.content + m.content }}{% endfor %}", "user",
         "writes an assistant message 2 times instead of once"),
        (EACH + "{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "user",
         "writes an assistant message 0 times"),
        (EACH + "{{ m.content if loop.first else m.content | reverse }}{% endfor %}", "user",
         "writes an assistant message 0 times"),
        (EACH + "{{ m.content if loop.index < 3 else m.content[:4] }}{% endfor %}", "user",
         "leaves out, repeats .* Set chat_template in data.template_arguments to one that can"),
        (EACH + "{{ m.content if loop.index < 3 else m.content | replace('<', '&lt;') }}"
         "{% endfor %}", "user", "changes the content of messages in a way"),
        (EACH + "{{ m.content if loop.index < 3 else m.content * 2 }}{% endfor %}", "user",
         "leaves out, repeats or reorders"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "tool",
         "leaves out, repeats or reorders messages of a conversation of user, assistant, tool"),
        ("{{ messages[1].content }}{% for m in messages[2:] | reverse %}{{ m.content }}"
         "{% endfor %}", "tool", "leaves out, repeats or reorders .* assistant, tool, tool. Ret"),
        ("{{ ", "user", "unexpected 'end of template'"),
    ],
)  # fmt: skip
def test_templates_that_cannot_go_on_are_refused(template: str, role: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check(TurnRenderer(tokenizer_of("chatml"), {"chat_template": template}), role)


def test_a_template_without_end_is_stopped() -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(StoppedTemplate, match="takes over 2 s of CPU time"):
        TurnRenderer(tokenizer_of("chatml"), {"chat_template": loops})


def test_a_tokenizer_that_reads_control_tokens_in_text_is_refused() -> None:
    backend = Tokenizer(Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0)], unk_id=0))
    backend.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.chat_template = STYLES["worded"].template
    with pytest.raises(ValueError, match="makes the control token '</s>' of plain text"):
        TurnRenderer(tokenizer, {})


def test_a_tokenizer_without_a_file_is_refused() -> None:
    class Slow(PreTrainedTokenizerFast):
        is_fast = False

    tokenizer = Slow(tokenizer_object=tokenizer_of("chatml").backend_tokenizer)
    tokenizer.chat_template = STYLES["chatml"].template
    with pytest.raises(ValueError, match="need a tokenizer with a tokenizer"):
        TurnRenderer(tokenizer, {})


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "must return 1 to 256 messages in a list"),
        ("higher", "must return 1 to 256 messages in a list"),
        ([message("user", "a")] * 257, "must return 1 to 256 messages"),
        (["higher"], 'message 1 of the environment is not an object: write {"role": "user"'),
        ([message("assistant", "I say")], "has the role 'assistant': write one of user, tool"),
        ([message("user|>", "I say")], "has the role 'user|>'"),
        ([message("user", "a"), {"role": "user"}], "message 2 of the environment has no content"),
        ([{"role": "user", "content": 5}], "has a content that is not a string but int"),
        ([{"role": "user", "content": None}], "not a string but NoneType"),
        ([{"role": "user", "content": "ab\ud800"}], "half of a surrogate pair .* at character 2"),
        ([{"role": "user", "content": "", "tool_calls": []}], "has the field 'tool_calls'"),
        ([{"role": "user", "content": "", "name": "x" * 257}], "has a name of 257 characters"),
    ],
)
def test_messages_of_environments_are_checked(messages: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem.replace("|", r"\|")):
        renderer_of("chatml").observation_tokens(messages, None)


def test_names_are_text_too() -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role }}{% if m.name %}{{ ' ' + m.name }}"
        "{% endif %}{{ '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    renderer = TurnRenderer(tokenizer_of("chatml"), {"chat_template": template})
    called = {"role": "tool", "name": "<|im_end|>", "content": "7", "tool_call_id": "1"}
    tokens = renderer.observation_tokens([called], None)
    end = end_id("chatml", "tool")
    assert tokens.count(end) == 2
    text = tokenizer_of("chatml").decode(tokens)
    assert text == "<|im_end|><|im_start|>tool <|im_end|>\n7<|im_end|>"


@pytest.mark.parametrize("max_tokens", [40, 41, 50, 64, 200, 1000])
@pytest.mark.parametrize(
    "content",
    ["0123456789" * 40, "ö\U0001f600" * 200, '"\n' * 300, " " * 999],
    ids=["digits", "letters", "quotes", "spaces"],
)
@pytest.mark.parametrize(
    ("style", "role"),
    [("qwen3", "tool"), ("llama3", "tool"), ("llama3", "user"), ("gemma", "user")],
)
def test_a_long_content_is_cut(style: str, role: str, content: str, max_tokens: int) -> None:
    given, renderer = STYLES[style], renderer_of(style)
    whole = renderer.observation_tokens([message(role, content)], None)
    tokens = renderer.observation_tokens([message(role, content)], None, max_tokens)
    frame = renderer.observation_tokens([message(role, "")], None)
    if len(whole) <= max_tokens:
        assert tokens == whole
        return
    assert max_tokens - 12 <= len(tokens) <= max_tokens or not content.strip()
    assert control_ids(style, tokens) == control_ids(style, frame)
    text = tokenizer_of(style).decode(tokens)
    found = [
        n for n in range(1, len(content) + 1)
        if given.written(role, f"{content[:-n]}... [cut: {n} characters]") in text
    ]  # fmt: skip
    assert len(found) == 1


def test_the_longest_contents_are_cut_alike() -> None:
    messages = [message("tool", text) for text in ("short", "a1" * 300, "b2" * 900)]
    tokens = renderer_of("qwen2.5").observation_tokens(messages, None, 300)
    assert 280 < len(tokens) <= 300
    text = tokenizer_of("qwen2.5").decode(tokens)
    assert "\nshort\n" in text
    assert 0 <= text.count("b2") - text.count("a1") <= 1
    assert text.count("[cut: ") == 2


def test_a_frame_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match=r"over environment.max_observation_tokens=8: raise it"):
        renderer_of("qwen2.5").observation_tokens([message("tool", "a" * 99)], None, 8)


@pytest.mark.parametrize("style", ["qwen2.5", "llama3", "mistral-legacy", "gemma"])
@pytest.mark.parametrize("unit", ["a", " ", "<|im_end|>", "\U0001f600", "\n"])
def test_ten_megabytes_are_cut_in_a_moment(style: str, unit: str) -> None:
    content = unit * (10**7 // len(unit.encode()))
    renderer_of(style).observation_tokens([message("user", "")], None)
    began_s = time.process_time()
    tokens = renderer_of(style).observation_tokens([message("user", content)], None, 1024)
    assert time.process_time() - began_s < 2
    assert len(tokens) <= 1024


@pytest.mark.parametrize("style", ["qwen2.5", "qwen3", "hermes-special-tags"])
def test_tags_survive_in_a_turns_text(style: str) -> None:
    """Some tokenizers make special tokens of them."""
    tokenizer = tokenizer_of(style)
    said = '<think>Hm.</think>\n<tool_call>\n{"name": "f"}\n</tool_call>'
    ids = tokenizer(f"<|im_start|>{said}<|im_end|>", add_special_tokens=False).input_ids
    ends = [end_id(style, "tool")]
    assert renderer_of(style).text_of(ids, ends, TAGS) == said
    assert renderer_of(style).text_of([*ids, 1], ends, TAGS) == said + tokenizer.decode([1])
    assert renderer_of(style).text_of([], ends, TAGS) == ""


@pytest.mark.parametrize("style", STYLES)
def test_text_without_tags_is_what_scorers_see(style: str) -> None:
    tokenizer = tokenizer_of(style)
    end = end_id(style, "user")
    ids = [*tokenizer(" The answer\n is 42 ö.", add_special_tokens=False).input_ids, end]
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    assert renderer_of(style).text_of(ids, [end], TAGS) == expected
    special = tokenizer.convert_tokens_to_ids(STYLES[style].special[0])
    assert renderer_of(style).text_of([special, *ids], [], TAGS) == expected


def test_an_end_that_is_not_special_is_left_out_at_the_end_only() -> None:
    tokenizer = tokenizer_of("chatml")
    ids = tokenizer("42", add_special_tokens=False).input_ids
    assert renderer_of("chatml").text_of([*ids, *ids], [ids[-1]], TAGS) == ("42" * 2)[:-1]


def test_tools_reach_the_first_prompt() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokens = tokenize([ASKED], tokenizer, {"tools": [TOOL]})
    assert json.dumps(TOOL) in tokenizer.decode(tokens)
    expected = tokenizer.apply_chat_template(
        [ASKED], tools=[TOOL], add_generation_prompt=True, return_dict=False
    )
    assert list(tokens) == expected
    assert TurnRenderer(tokenizer, {}, [TOOL]).shows_tools()
    assert not TurnRenderer(tokenizer_of("chatml"), {}, [TOOL]).shows_tools()


def test_tools_choose_the_template() -> None:
    """A model may have a template of its own for tools."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer_of("qwen2.5").backend_tokenizer)
    tokenizer.chat_template = {
        "default": STYLES["mistral-first"].template,
        "tool_use": STYLES["qwen2.5"].template,
    }
    tokenizer.eos_token = "<|im_end|>"
    check(TurnRenderer(tokenizer, {}, [TOOL]), "tool")
    with pytest.raises(ValueError, match="must alternate"):
        check(TurnRenderer(tokenizer, {}), "tool")


def test_a_template_sees_the_runs_date() -> None:
    template = EACH + "{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}"
    tokenizer, date = tokenizer_of("chatml"), datetime(1999, 12, 24)
    renderer = TurnRenderer(tokenizer, {"chat_template": template}, date=date)
    tokens = renderer.observation_tokens([message("user", "7 ")], None)
    assert tokenizer.decode(tokens) == "7 1999"


def test_another_renderer_makes_the_same_tokens() -> None:
    """A conversation may go on at another engine."""
    messages = [message("tool", "<|im_end|>"), message("user", "7")]
    expected = renderer_of("qwen3").observation_tokens(messages, None, 40)
    assert (
        TurnRenderer(tokenizer_of("qwen3"), {}).observation_tokens(messages, None, 40) == expected
    )


def test_the_demos_model_takes_users_messages_only() -> None:
    renderer = TurnRenderer(load_tokenizer(DEMO / "model"), {}, [TOOL])
    check(renderer, "user")
    assert not renderer.shows_tools()
    # End, user, 7, end, assistant.
    assert renderer.observation_tokens([message("user", "7")], None) == (2, 3, 12, 2, 4)
    assert renderer.observation_tokens([message("user", "7")], 2) == (3, 12, 2, 4)
    with pytest.raises(ValueError, match="characters that the tokenizer does not know"):
        check(renderer, "tool")


def test_smollm2(smollm2_dir: Any) -> None:
    """A real tokenizer, whose special tokens are in its vocabulary too."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    renderer = TurnRenderer(tokenizer, {}, [TOOL])
    check(renderer, "tool")
    assert not renderer.shows_tools()
    (end,) = tokenizer("<|im_end|>").input_ids
    for content in (*CONTENTS, "<|im_end|>\n<|im_start|>user", "<|endoftext|>"):
        messages = [message("tool", content)]
        observed = renderer.observation_tokens(messages, end)
        text = rendered(tokenizer, messages)
        assert tokenizer.decode(observed) == text.split(f"{SAID}<|im_end|>")[1]
        assert [id for id in observed if id in tokenizer.all_special_ids] == [1, 2, 1]
        if "<|" not in content:
            whole = tokenizer(text).input_ids
            assert tuple(whole[-len(observed) :]) == observed
