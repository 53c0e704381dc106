"""Chat templates run with bounded time and memory, and give the same tokens as transformers."""

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from refrain.engines.data.dataset import load_dataset, load_tokenizer
from refrain.engines.data.messages import BadRowError, tokenize
from refrain.engines.data.template import StoppedTemplate, TemplateProcess, templates
from tests.conftest import DEMO

MESSAGES = [{"role": "system", "content": "ö\U0001f600"}, {"role": "user", "content": "1 + 2 ="}]
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
STOPPED = {
    "two loops": (LOOPS, "takes over 2 s of CPU time"),
    "a long text": ("{{ 'a' * 10 ** 8 }}", "makes 100,000,000 characters, over 1,0"),
    "a text of no end": ("{{ 'a' * 10 ** 12 }}", "takes over 2048 MiB of memory"),
    "a width": ("{{ '%9000000000d' % 1 }}", "takes over 2048 MiB of memory"),
    "a filter": ("{{ 'x'|center(10 ** 10) }}", "takes over 2048 MiB of memory"),
    "a list that doubles": (
        "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
        "{% endfor %}",
        # On a slow machine it fills 2 s before 2048 MiB.
        "takes over (2048 MiB of memory|2 s of CPU time)",
    ),
    "a macro that calls itself": (
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "calls itself without end",
    ),
    "parentheses": ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", "calls itself without end"),
}
REFUSED = {
    "it raises": ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    "no template": ("{{ ", "unexpected 'end of template'"),
    "out of its sandbox": ("{{ ''.__class__.__mro__ }}", "'__class__' .* is unsafe"),
    "another file": ("{% include '/etc/passwd' %}", "no loader"),
    "what is not there": ("{{ messages.nobody.nothing }}", "has no attribute 'nobody'"),
    "nothing": ("", "makes no tokens of `prompt`"),
    "a number": (5, "compile non template nodes"),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(DEMO / "model")


@pytest.mark.parametrize("case", STOPPED)
def test_a_template_without_end_is_stopped(case: str, tokenizer, monkeypatch) -> None:
    template, message = STOPPED[case]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(StoppedTemplate, match=f"the chat template {message}"):
        tokenize(MESSAGES, tokenizer, {})


@pytest.mark.parametrize("case", REFUSED)
def test_template_errors_are_errors_of_the_row(case: str, tokenizer, monkeypatch) -> None:
    template, message = REFUSED[case]
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(BadRowError, match=message):
        tokenize(MESSAGES, tokenizer, {})


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        (None, {}),
        ("{{ messages }}", {}),
        ("{{ messages|tojson }}{{ eos_token }}{{ think }}", {"think": [1, None, 2.5]}),
        ("{{ tools }}{{ documents }}", {"tools": [TOOL], "documents": [{"title": "t"}]}),
        ("{% if add_generation_prompt %}A{% endif %}", {}),
        ("1", {"chat_template": "{{ 2 }}"}),
    ],
)
def test_tokens_are_those_of_transformers(template, arguments, tokenizer, monkeypatch) -> None:
    if template:
        monkeypatch.setattr(tokenizer, "chat_template", template)
    expected = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False, **arguments
    )
    assert tokenize(MESSAGES, tokenizer, arguments) == tuple(expected)


def test_a_template_sees_the_date_that_it_is_given(tokenizer, monkeypatch) -> None:
    def text(template: str, date: datetime | None) -> str:
        monkeypatch.setattr(tokenizer, "chat_template", template)
        return tokenizer.decode(tokenize(MESSAGES, tokenizer, {}, date))

    # Granite calls it directly. A macro must see the same date.
    direct = "{{ strftime_now('%d.%m.%Y %H:%M') }}"
    macro = "{% macro day() %}" + direct + "{% endmacro %}{{ day() }}"
    expected = tokenizer.decode(tokenizer("24.12.1999 18:30", add_special_tokens=False).input_ids)
    for template in (direct, macro):
        assert text(template, datetime(1999, 12, 24, 18, 30)) == expected
    year = "{{ strftime_now('%Y') }}"
    assert text(year, None) == text(year, datetime.now())


def test_a_template_draws_the_same_again_and_another_for_another_prompt(tokenizer) -> None:
    """The filter `random` depends on nothing but the messages."""

    def drawn() -> list[tuple[int, ...]]:
        process = TemplateProcess()
        arguments = {"chat_template": "{{ range(10 ** 5)|random }}"}
        try:
            return [
                tuple(process.tokens({**arguments, "conversations": [m]}, tokenizer))
                for m in (MESSAGES, MESSAGES[1:], MESSAGES)
            ]
        finally:
            process.close()

    first = drawn()
    assert first == drawn()
    assert first[0] == first[2] != first[1]


def test_the_first_row_that_stops_it_ends_the_reading(tmp_path, tokenizer, monkeypatch) -> None:
    """Otherwise each further row would take as long."""
    row = {"data_source": "s", "prompt": MESSAGES, "reward_model": {"ground_truth": "3"}}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for _ in range(50)))
    monkeypatch.setattr(tokenizer, "chat_template", LOOPS)
    began_s = os.times().elapsed
    with pytest.raises(ValueError, match=r"rows.jsonl row 1: the chat template takes over 2 s"):
        load_dataset([file], tokenizer, 64)
    assert os.times().elapsed - began_s < 60


def test_stopped_or_killed_template_process_restarts(tokenizer) -> None:
    process = TemplateProcess()
    arguments = {"conversations": [MESSAGES], "chat_template": "{{ messages[1].content }}"}
    expected = tokenizer("1 + 2 =", add_special_tokens=False)["input_ids"]
    assert process.tokens(arguments, tokenizer) == expected
    assert process._process
    process._process.kill()
    with pytest.raises(StoppedTemplate, match="ended its process"):
        process.tokens(arguments, tokenizer)
    assert process.tokens(arguments, tokenizer) == expected
    ended = process._process
    process.close()
    assert ended.poll() is not None


def test_template_process_has_no_secrets_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "1234")
    code = (
        "from refrain.engines.data.template import TemplateProcess\n"
        "process = TemplateProcess()\n"
        "from pathlib import Path\n"
        f"process.try_tokenizer(Path({str(DEMO)!r}) / 'model/tokenizer.json')\n"
        "print(process._process.pid, flush=True)\n"
        "import os, time\n"
        "print('SECRET' in open(f'/proc/{process._process.pid}/environ').read(), flush=True)\n"
        "os._exit(0)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    pid, has_secret = out.stdout.split()
    assert has_secret == "False"
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


BLOWS_UP = {"type": "Replace", "pattern": {"Regex": "."}, "content": "a" * 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"normalizer": {"type": "Sequence", "normalizers": [BLOWS_UP] * 7}},
            "the tokenizer (ended its process|takes over|makes)",
        ),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 10**9, "b": 0}, "unk_token": "b"}},
            "its token ids go to 1,000,000,000",
        ),
        ({"normalizer": {"type": "Nothing"}}, "did not match any variant"),
        ({"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}, "invalid value"),
    ],
)
def test_a_tokenizer_is_tried_before_it_is_loaded(changes, message, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(json.loads((DEMO / "model" / file.name).read_text()) | changes))
    with pytest.raises(ValueError, match=rf"holds no tokenizer that can be read: .*{message}"):
        load_tokenizer(tmp_path)


def test_template_process_does_not_load_torch() -> None:
    """Loading torch would take seconds and gigabytes of address space."""
    code = "import refrain.engines.data.template_process, sys; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    templates.close()
