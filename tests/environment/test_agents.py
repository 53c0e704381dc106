"""Agents that speak chat completions: their calls are one line of turns, and each fault has a
name."""

import asyncio
import http.client
import json
import re
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from refrain.engines.environment.conversations import load_user_code
from refrain.engines.environment.pool import EnvironmentFailed, EnvironmentPool
from refrain.engines.environment.process import EnvironmentProcess
from refrain.engines.user_code.importing import UserFault
from refrain.schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentTask,
    ToolCall,
    TurnText,
)
from tests.conftest import REPOSITORY
from tests.environment.test_pool import logged, started
from tests.environment.test_process import until

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
SCRIPT = f"""{HEAD}
async def run(task, model):
    scope = {{}}
    exec("async def script(task, model):\\n" + task.extra_info["script"], globals(), scope)
    return await scope["script"](task, model)
"""
"""Agent that runs its task's script."""
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
    return EnvironmentConfig(
        path=path, **{"timeout_s": 5.0, "processes": 1, "retries": 0} | changes
    )


def body_of(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def running(*lines: str) -> str:
    """Return a file whose `run` has these lines."""
    return "async def run(task, model):\n" + body_of(lines)


def task_of(sample: str = "a", script: Sequence[str] = ()) -> EnvironmentTask:
    return EnvironmentTask(sample, "mine", "42", {"script": body_of(script)}, 1, PROMPT)


async def converse(
    pool: EnvironmentPool,
    *turns: TurnText,
    sample: str = "a",
    known: Sequence[EnvironmentAnswer] = (),
    script: Sequence[str] = (),
) -> list[EnvironmentAnswer]:
    """Return the answers to these turns, asked for one by one after those that are known."""
    answers, task = list(known), task_of(sample, script)
    for number in range(len(answers) + 1, len(turns) + 1):
        answers.append(await pool.answer(sample, task, turns[:number], answers))
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
    (REPOSITORY / "docs" / "adapters.md").read_text().partition("speaks chat completions")[2],
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


RUNS: dict[tuple[str, ...], EnvironmentAnswer] = {
    ("return 3",): scored(3.0),
    ("return {'score': 0.5}",): scored(0.5),
    ("await model.chat(task.messages)",): scored(None),
    ("asyncio.ensure_future(model.chat(task.messages))", "return 1"): scored(1.0),
    (
        "first = said(await model.chat(task.messages, temperature=0.1, max_tokens=3))",
        "more = [{'role': 'system', 'content': 'x'}, user([{'type': 'text', 'text': 'y'}])]",
        "await model.chat([*task.messages, first, *more])",
    ): EnvironmentAnswer(({"role": "system", "content": "x"}, {"role": "user", "content": "y"})),
}


async def test_a_run_may_end_or_go_on(tmp_path):
    async with started(write(tmp_path, SCRIPT)) as pool:
        for script, last in RUNS.items():
            name = str(script)
            assert await converse(pool, TurnText("7"), sample=name, script=script) == [last], name


FIRST = "first = said(await model.chat(task.messages))"
AGAIN = "await model.chat([*task.messages, first, user('x')])"


FAULTS: list[tuple[tuple[str, ...], str]] = [
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
        "has the role 'assistant' .*: write one of user, tool, system",
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
    ((FIRST, "await asyncio.sleep(60)"), "no answer within 1 s"),
    (("await asyncio.sleep(60)",), "no answer within 1 s"),
]  # fmt: skip
HANGS = [
    ((FIRST, "time.sleep(60)"), "stood still for 1 s"),
    (
        (FIRST, "while True:", "    try: await asyncio.sleep(60)", "    except BaseException: 1"),
        "no answer within 1 s",
    ),
]


async def fault_of(pool: EnvironmentPool, script: Sequence[str]) -> str:
    with pytest.raises(EnvironmentFailed) as failed:
        await converse(
            pool, TurnText("turn 1"), TurnText("turn 2"), sample=str(script), script=script
        )
    return failed.value.reason


async def test_a_fault_is_named_in_time(tmp_path):
    """All fail at the same time in one process."""
    async with started(write(tmp_path, SCRIPT, timeout_s=1.0)) as pool:
        process, began_s = await pool._slots[0].ready(), time.monotonic()
        found = await asyncio.gather(*(fault_of(pool, script) for script, _ in FAULTS))
        assert time.monotonic() - began_s < 1.0 + 2.0
        assert process.ended is None
    for (script, reason), one in zip(FAULTS, found, strict=True):
        assert re.search(reason, one), (script, one)


@pytest.mark.parametrize(("script", "reason"), HANGS, ids=["blocked", "stubborn"])
async def test_a_hang_is_named_in_time(tmp_path, script, reason):
    async with started(write(tmp_path, SCRIPT, timeout_s=1.0)) as pool:
        began_s = time.monotonic()
        assert re.search(reason, await fault_of(pool, script))
        assert time.monotonic() - began_s < 1.0 + 2.0


TOOLS = """
def multiply(a: int, b: int) -> int:
    "Product of two numbers."
    return a * b

tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}, multiply]
"""


async def test_a_turns_tool_calls_come_as_openai_writes_them(tmp_path):
    """The agent's own copy of its message may have other empty fields and other spaces."""
    lines = (
        "messages = list(task.messages)",
        "choice = (await model.chat(messages, tools=model.tools))['choices'][0]",
        "message = choice['message']",
        "call = message['tool_calls'][0]",
        "arguments = json.loads(call['function']['arguments'])",
        "log(json.dumps(choice))",
        "call['function']['arguments'] = json.dumps(arguments, indent=1)",
        "messages += [{**message, 'refusal': None, 'annotations': []}]",
        "product = str(multiply(**arguments))",
        "messages += [{'role': 'tool', 'tool_call_id': call['id'], 'content': product}]",
        "choice = (await model.chat(messages))['choices'][0]",
        "messages += [choice['message'], user(choice['problem'])]",
        "await model.chat(messages)",
    )
    config = write(tmp_path, TOOLS + running(*lines))
    text = "<think>a <tool_call>?</think> So: <tool_call>{...}</tool_call>"
    turns = [
        TurnText(text, (ToolCall("multiply", {"a": 6, "b": 7}),)),
        TurnText("<tool_call>", problem="Tool call 1 is not closed."),
    ]
    pool = EnvironmentPool(config)
    tools = (await pool.start()).tools
    assert [tool["function"]["name"] for tool in tools] == ["look", "multiply"]
    product = {"role": "tool", "tool_call_id": "call_1_1", "content": "42"}
    answers = [
        EnvironmentAnswer((product,), num_calls=1),
        observed("Tool call 1 is not closed."),
    ]
    assert await converse(pool, *turns) == answers
    await pool.close()
    choice = json.loads(logged(config)[0])
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "<think>a <tool_call>?</think> So:"
    assert choice["message"]["tool_calls"][0]["function"] == {
        "name": "multiply",
        "arguments": '{"a": 6, "b": 7}',
    }


@pytest.mark.parametrize(
    ("body", "kwargs", "reason"),
    [
        ("def run(task, model): 1", {}, "run.. in .* is a plain function: write `async def run`"),
        (running("1"), {"a": 1}, "kwargs are for a class, but .* has a function"),
        (running("1") + "\ntools = [{}]", {}, "the tool '{}' .dict. is no schema of a function"),
        (f"{TOOLS}tools += tools\n{running('1')}", {}, "two tools are called look: rename one"),
        (running("1") + "\ntools = 3", {}, "`tools` in .* is a int: write a list"),
        ("async def run(job): 1", {}, "has no environment: .*`async def run.task, model.`"),
        (running("1") + "\nclass A:\n    def step(self, turn): 1", {}, r"several .*\(A, run\)"),
    ],
)
def test_an_agent_that_cannot_run_is_refused(tmp_path, monkeypatch, body, kwargs, reason):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(UserFault, match=reason):
        load_user_code(write(tmp_path, body).path, None, kwargs)


def test_a_tool_may_be_called_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    body = "async def run(code: str) -> str: return code\ntools = [run]"
    code = load_user_code(write(tmp_path, body).path, None, {})
    assert not code.is_agent
    assert list(code.tools) == ["run"]


async def test_a_killed_worker_is_replayed(tmp_path):
    config = write(tmp_path, ECHO, retries=1)
    turns = [TurnText(text) for text in "xyz"]
    async with started(config) as pool:
        known = await converse(pool, *turns[:2])
        assert known == [observed("1 x"), observed("2 y")]
        process = await pool._slots[0].ready()
        assert process._group is not None
        psutil.Process(process._group).kill()
        assert await converse(pool, *turns, known=known) == [*known, scored(7.0)]
    assert logged(config) == ["a x", "a y", "a x", "a y", "a z"]


CUT = """
class Cut:
    async def run(self, task, model):
        try:
            await model.chat(task.messages)
        except asyncio.CancelledError:
            log("cancelled"); raise
    def end(self, reason): log("end", reason); return 0.25
    def close(self): log("close")
"""


async def test_an_agent_that_is_cut_is_cancelled_and_scored(tmp_path):
    config = write(tmp_path, CUT)
    async with started(config) as pool:
        assert await pool.end("a", task_of(), [TurnText("x")], [], "length") == 0.25
        await pool.forget(["a"])
    assert logged(config) == ["cancelled", "end length", "close"]


POST = """
def post(model, request, path="/chat/completions", method="POST", **headers):
    place = model.base_url.partition("//")[2].partition("/")
    connection = http.client.HTTPConnection(place[0], timeout=60)
    headers = {"Authorization": f"Bearer {model.api_key}", **headers}
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    connection.request(method, "/v1" + path, body, headers)
    response = connection.getresponse()
    answer = response.status, json.loads(response.read())
    log(json.dumps(answer))
    return answer

async def posted(*of, **headers):
    return await asyncio.to_thread(post, *of, **headers)
"""


REFUSED = [
    ("{'messages': task.messages, 'stream': True}", 400, "asks for a stream"),
    ("{'messages': [user('x')]}", 400, "call 1 changes message 1"),
    ("b'[]'", 400, "no JSON object"),
    ("b'{'", 400, "not JSON"),
    ("b'[' * 100_000", 400, "not JSON"),
    ("{}, '/completions'", 404, "there is no /v1/completions: use /v1/chat/completions"),
    ("{}, '/models'", 405, "use GET"),
    ("{}, Authorization='Bearer x'", 401, "names no conversation"),
    ("b'', **{'Content-Length': '99999999'}", 413, "send at most 16777216"),
    ("{}, **{'Content-Length': 'x'}", 411, "Content-Length"),
    ("{}, **{'X-Long': 'x' * 70_000}", 431, "headers"),
]


async def test_a_request_that_cannot_be_served_is_refused(tmp_path):
    config = write(tmp_path, POST + SCRIPT)
    async with started(config) as pool:
        for number, (call, status, reason) in enumerate(REFUSED):
            script = (f"await posted(model, {call})", "1 / 0")
            with pytest.raises(EnvironmentFailed):
                await converse(pool, TurnText("x"), sample=call, script=script)
            # The refusal of a call ends the conversation at once. Its thread logs the answer.
            await until(lambda wanted=number: len(logged(config)) > wanted, call)
            found, content = json.loads(logged(config)[number])
            assert found == status, call
            assert reason in content["error"]["message"], call
            assert content["error"]["type"] in ("invalid_request_error", "authentication_error")


AGAIN_LATER = """
async def run(task, model):
    try:
        await asyncio.wait_for(model.chat(task.messages), 0.05)
    except asyncio.TimeoutError:
        return len(said(await model.chat(task.messages))["content"])
"""
CLIENT = """
from openai import AsyncOpenAI

async def run(task, model):
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, timeout=0.1, max_retries=9)
    ask = client.chat.completions.create
    answer = await ask(model="any", messages=task.messages, temperature=0.5)
    messages = [*task.messages, answer.choices[0].message, user("more")]
    answer = await ask(model="any", messages=messages)
    return len(answer.choices[0].message.content)
"""


@pytest.mark.parametrize("body", [AGAIN_LATER, CLIENT], ids=["plain", "openai"])
async def test_a_client_that_gave_up_may_ask_again(tmp_path, body):
    process = EnvironmentProcess(write(tmp_path, body, timeout_s=10.0))
    await process.start()
    task = {"messages": PROMPT, "prompt_key": "a"}
    await process.call("reset", "one", task=json.dumps(task))
    for number, text in enumerate(("long", "longer")[: 1 + (body == CLIENT)], 1):
        await asyncio.sleep(0.5)
        answer = await process.call("step", "one", number, text=text, calls=[], problem=None)
    assert answer["score"] == len(text)
    await process.close()


BLOCKING = f"""{POST}
def talk(task, model):
    messages = list(task.messages)
    for number in range(1, 4):
        status, answer = post(model, {{"messages": messages}})
        messages += [said(answer), user(f"{{number}} {{said(answer)['content']}}")]
    return len(messages)

async def run(task, model):
    return await asyncio.to_thread(talk, task, model)
"""


@pytest.mark.parametrize("body", [ECHO, BLOCKING], ids=["plain", "in threads"])
async def test_20_conversations_share_a_process(tmp_path, body):
    async with started(write(tmp_path, body)) as pool:

        async def one(name: str) -> list[EnvironmentAnswer]:
            return await converse(pool, *(TurnText(f"{name}{i}") for i in "123"), sample=name)

        names = [f"n{number}." for number in range(20)]
        # All have begun before the first goes on.
        await asyncio.gather(*(converse(pool, TurnText(f"{name}1"), sample=name) for name in names))
        for name, answers in zip(names, await asyncio.gather(*map(one, names)), strict=True):
            assert answers == [observed(f"1 {name}1"), observed(f"2 {name}2"), scored(7.0)]


def status_of_models(base_url: str, key: str) -> int:
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=10)
    with closing(connection):
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status


async def test_an_api_key_is_refused_when_its_conversation_is_over(tmp_path):
    config = write(tmp_path, running("log(model.base_url, model.api_key)") + ECHO.partition(":")[2])
    async with started(config) as pool:
        await converse(pool, TurnText("x"))
        base_url, key = logged(config)[0].split()
        assert await asyncio.to_thread(status_of_models, base_url, key) == 200
        await pool.forget(["a"])
        assert await asyncio.to_thread(status_of_models, base_url, key) == 401
