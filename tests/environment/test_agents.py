"""Agents that speak chat completions: their calls are one line of turns, and each fault has a
name."""

import asyncio
import http.client
import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from engines.environment.pool import EnvironmentFailed, EnvironmentPool
from engines.environment.process import EnvironmentProcess
from schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentTask,
    ToolCall,
    TurnText,
)
from tests.conftest import REPOSITORY
from tests.environment.test_pool import started

PROMPT = [{"role": "user", "content": "6*7=?"}]
HEAD = """
import asyncio, http.client, json, os, time
from pathlib import Path
LOG = Path(__file__).with_name("log")

def log(*words):
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

def said(answer): return answer["choices"][0]["message"]
def user(content): return {"role": "user", "content": content}
"""
ECHO = """
async def run(task, model):
    messages = list(task.messages)
    for number in range(1, 4):
        messages.append(said(await model.chat(messages)))
        log(task.prompt_key, messages[-1]["content"])
        messages.append(user(f"{number} {messages[-1]['content']}"))
    return len(messages)
"""


def write(directory: Path, body: str, head: str = HEAD, **changes: Any) -> EnvironmentConfig:
    path = directory / "mine.py"
    path.write_text(f"{head}\n{body}\n")
    return EnvironmentConfig(path=path, **{"timeout_s": 5.0, "processes": 1, "retries": 0} | changes)


def running(*lines: str) -> str:
    """Return a file whose `run` has these lines."""
    return "async def run(task, model):\n" + "\n".join(f"    {line}" for line in lines)


def task_of(sample: str = "a") -> EnvironmentTask:
    return EnvironmentTask(sample, "mine", "42", {}, 1, PROMPT)


async def converse(
    pool: EnvironmentPool, *turns: TurnText, sample: str = "a", known: Any = ()
) -> list[EnvironmentAnswer]:
    """Return the answers to these turns, asked for one by one after those that are known."""
    answers = list(known)
    for number in range(len(answers) + 1, len(turns) + 1):
        answers.append(await pool.answer(sample, task_of(sample), turns[:number], answers))
    return answers


async def answers_to(config: EnvironmentConfig, *texts: str) -> list[EnvironmentAnswer]:
    async with started(config) as pool:
        return await converse(pool, *map(TurnText, texts))


def observed(*contents: str) -> EnvironmentAnswer:
    return EnvironmentAnswer(tuple({"role": "user", "content": one} for one in contents))


def scored(score: float | None) -> EnvironmentAnswer:
    return EnvironmentAnswer(score=score, ended=True)


EXAMPLES = re.findall(
    r"```python\n(.*?)```",
    (REPOSITORY / "docs" / "environments.md").read_text().partition("speaks chat completions")[2],
    re.DOTALL,
)


async def test_the_documented_agents_work(tmp_path):
    first, second = EXAMPLES
    config = write(tmp_path, first, head="")
    async with started(config) as pool:
        look = observed("Look again.")
        assert await converse(pool, TurnText("41"), TurnText("is 42")) == [look, scored(0.5)]
        assert await converse(pool, TurnText("42"), sample="b") == [scored(1.0)]
        answers = await converse(pool, TurnText("x"), sample="c")
        cut = [TurnText("x"), TurnText("cut")]
        assert await pool.end("c", task_of("c"), cut, answers, "length") == 0.0
    assert await answers_to(write(tmp_path, second, head=""), "42") == [scored(1.0)]


@pytest.mark.parametrize(
    ("lines", "last"),
    [
        (("return 3",), scored(3.0)),
        (("return {'score': 0.5}",), scored(0.5)),
        (("await model.chat(task.messages)",), scored(None)),
        (("calling = asyncio.ensure_future(model.chat(task.messages))", "return 1"), scored(1.0)),
        (
            (
                "first = said(await model.chat(task.messages, temperature=0.1, max_tokens=3))",
                "more = [{'role': 'system', 'content': 'x'}, user([{'type': 'text', 'text': 'y'}])]",
                "await model.chat([*task.messages, first, *more])",
            ),
            EnvironmentAnswer(({"role": "system", "content": "x"}, {"role": "user", "content": "y"})),
        ),
        (
            (
                "try: await asyncio.wait_for(model.chat(task.messages), 0.05)",
                "except asyncio.TimeoutError: return float(said(await model.chat(task.messages))"
                "['content'])",
            ),
            scored(7.0),
        ),
    ],
    ids=["no call", "a dict", "none", "a call left", "messages", "a call again"],
)  # fmt: skip
async def test_a_run_may(tmp_path, lines, last):
    assert await answers_to(write(tmp_path, running(*lines)), "7") == [last]


FIRST = "first = said(await model.chat(task.messages))"
AGAIN = "await model.chat([*task.messages, first, user('x')])"


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (("await model.chat([user('6*8=?')])",), r"call 1 changes message 1 .*6\*7.* to .*6\*8"),
        (("await model.chat([])",), "call 1 has 0 messages.*pass task.messages"),
        (("await model.chat([*task.messages, user('x')])",), "call 1 adds .*'?x.* to the prompt"),
        (("await model.chat('6*7=?')",), "has the messages '6.*: pass a list"),
        (("await model.chat(['6*7=?'])",), "message 1 of a call is '6"),
        ((FIRST, "first['content'] = 'y'", AGAIN), "call 2 changes message 2 .*turn 1.*repeat all"),
        ((FIRST, "first['role'] = 'user'", AGAIN), "call 2 changes message 2"),
        ((FIRST, "await model.chat(task.messages)"), "call 2 has 1 messages.*conversation has 2"),
        ((FIRST, "await model.chat([*task.messages, first])"), "call 2 adds no message"),
        (
            (FIRST, "await model.chat([*task.messages, first, first])"),
            "has the role 'assistant': write one of user, tool, system",
        ),
        (
            ("await asyncio.gather(model.chat(task.messages), model.chat(task.messages))",),
            "call 2 came while call 1 waited",
        ),
        (("await model.chat(task.messages, stream=True)",), "asks for a stream"),
        (("await model.chat(task.messages, n=2)",), "asks for '2'.*rollout.group_size"),
        (("await model.chat(task.messages, tool_choice='required')",), "sets tool_choice"),
        (("await model.chat(task.messages, response_format={'type': 'json_object'})",), "json_obj"),
        (
            ("await model.chat(task.messages, tools=[{'function': {'name': 'f'}}])",),
            "passes the tools f, but the prompt shows none",
        ),
        (
            (FIRST, "await asyncio.to_thread(lambda: asyncio.run(model.chat([])))"),
            "another event loop: use model.base_url",
        ),
        (("try: await model.chat([])", "except ValueError: return 1.0"), "call 1 has 0 messages"),
        (("while True:", "    try: await model.chat([])", "    except ValueError: pass"), "call 1 h"),
        (("1 / 0",), "ZeroDivisionError: division by zero"),
        ((FIRST, "exit(3)"), "SystemExit: 3"),
        ((FIRST, "raise asyncio.CancelledError"), "cancelled itself"),
        ((FIRST, "return 'more'"), r"run\(\) returned 'more' \(str\): return a number or None"),
        ((FIRST, "return float('nan')"), "not a finite number"),
        ((FIRST, "await asyncio.sleep(60)"), "no answer within 0.5 s"),
        (("await asyncio.sleep(60)",), "no answer within 0.5 s"),
        ((FIRST, "time.sleep(60)"), "stood still for 0.5 s"),
        (
            (FIRST, "while True:", "    try: await asyncio.sleep(60)", "    except BaseException: 1"),
            "no answer within 0.5 s",
        ),
    ],
)  # fmt: skip
async def test_a_fault_is_named_in_time(tmp_path, lines, reason):
    async with started(write(tmp_path, running(*lines), timeout_s=0.5)) as pool:
        began_s = time.monotonic()
        with pytest.raises(EnvironmentFailed, match=reason):
            await converse(pool, TurnText("turn 1"), TurnText("turn 2"))
        assert time.monotonic() - began_s < 0.5 + 2.0
