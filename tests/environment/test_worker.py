"""The user's contract: what a file may define, and what its code may return."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from refrain.engines.environment.pool import EnvironmentPool
from refrain.engines.environment.process import CallFailed, EnvironmentProcess
from refrain.engines.environment.tools import call_problem, declared_tools
from refrain.engines.user_code.launch import worker_command
from refrain.engines.user_code.values import from_json, to_json
from refrain.schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentTask,
    ToolCall,
    TurnText,
)
from tests.conftest import REPOSITORY

TASK = EnvironmentTask("cafe", "mine", "4", {"hint": "even"}, 7)
WORKER_MODULES = (
    *(f"environment.{name}" for name in ("worker", "conversations", "tools", "answers", "loading")),
    *(f"environment.{name}" for name in ("agents", "completions", "endpoint")),
    "user_code.importing",
    "user_code.values",
)
GUESS = '''
import random

def multiply(a: int, b: int = 2) -> int:
    """Product of two numbers."""
    return a * b

class Guess:
    tools = [multiply]
    def reset(self, task): self.number = random.Random(task.seed).randint(1, 20)
    def step(self, turn):
        return {"score": 1.0} if int(turn.text) == self.number else "higher"
    def end(self, reason): return {"tokens": 0.25, "turns": {"score": 0.5}}.get(reason)
'''
NUMBER = "11"
"""What `Guess` draws from the seed of `TASK`."""
TOOLS = '''
import asyncio
from typing import Literal, Optional

def divide(a: float, b: float) -> float:
    """Quotient of two numbers."""
    return a / b

async def wait(s: float, note: Optional[str] = None):
    await asyncio.sleep(s)
    return {"waited": s, "note": note}

def leave():
    raise SystemExit("bye")

def pick(colour: Literal["red", "blue"], sizes: list[int] = []):
    return f"{colour} {sizes}"

def lost(key):
    return {1: 2}[key]

tools = [divide, wait, leave, pick, lost]
'''


NO_NUMBER = """The argument 'a' of divide is "1", but must be {"type": "number"}."""
NO_COLOUR = """The argument 'colour' of pick is "green", but must be {"enum": ["red", "blue"]}."""


def write(directory: Path, body: str, **changes: Any) -> EnvironmentConfig:
    path = directory / "mine.py"
    path.write_text(body)
    return EnvironmentConfig(path=path, **{"timeout_s": 10.0, "processes": 1} | changes)


def stepping(result: str, head: str = "") -> str:
    """Return a file whose `step` returns an expression of `turn`."""
    return f"{head}\nclass Mine:\n    def step(self, turn):\n        return {result}\n"


async def answer_to(config: EnvironmentConfig, *turns: TurnText) -> EnvironmentAnswer:
    """Return the answer to the last of these turns."""
    pool = EnvironmentPool(config.model_copy(update={"retries": 0}))
    await pool.start()
    recorded: list[EnvironmentAnswer] = []
    try:
        for number in range(1, len(turns) + 1):
            recorded.append(await pool.answer("one", TASK, turns[:number], recorded))
    finally:
        await pool.close()
    return recorded[-1]


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_class_goes_on_ends_and_scores_what_was_cut(tmp_path):
    config = write(tmp_path, GUESS)
    assert await answer_to(config, TurnText("3")) == EnvironmentAnswer((said("higher"),))
    won = EnvironmentAnswer((), 1.0, ended=True)
    assert await answer_to(config, TurnText("3"), TurnText(NUMBER)) == won
    pool = EnvironmentPool(config)
    setup = await pool.start()
    assert (setup.has_class, setup.has_end, setup.replays) == (True, True, True)
    assert [tool["function"]["name"] for tool in setup.tools] == ["multiply"]
    scores = [await pool.end(w, TASK, [TurnText("3")], [], w) for w in ("tokens", "turns", "time")]
    assert scores == [0.25, 0.5, None]
    await pool.close()


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ("'more'", EnvironmentAnswer((said("more"),))),
        (
            "[{'role': 'system', 'content': 'x'}]",
            EnvironmentAnswer(({"role": "system", "content": "x"},)),
        ),
        ("('more', 0.5)", EnvironmentAnswer((said("more"),), 0.5)),
        ("([{'role': 'user', 'content': 'x'}], 2)", EnvironmentAnswer((said("x"),), 2.0)),
        ("{'observation': 'more', 'score': 0.5}", EnvironmentAnswer((said("more"),), 0.5)),
        ("{'messages': [{'role': 'user', 'content': 'x'}]}", EnvironmentAnswer((said("x"),))),
        ("{'score': 0.5}", EnvironmentAnswer(score=0.5, ended=True)),
        ("True", EnvironmentAnswer(score=1.0, ended=True)),
        ("-3", EnvironmentAnswer(score=-3.0, ended=True)),
        ("None", EnvironmentAnswer(ended=True)),
        ("turn.problem", EnvironmentAnswer((said("no JSON"),))),
        ("turn.messages[-1]['role']", EnvironmentAnswer((said("assistant"),))),
    ],
)
async def test_step_may_return(tmp_path, result, answer):
    assert (
        await answer_to(write(tmp_path, stepping(result)), TurnText("a", (), "no JSON")) == answer
    )


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("float('nan')", "not a finite number"),
        ("{'score': float('inf')}", "not a finite number"),
        ("2e9", "within 1e\\+09"),
        ("('more', 'high')", "'high' \\(str\\), not a finite number"),
        ("{'points': 1}", "a dict with points: return `score`"),
        ("{}", "a dict with nothing"),
        ("object()", "return a text, messages, a number or None"),
        ("b'more'", "step\\(\\) returned .*: return a text"),
        ("[]", "returned 0 messages"),
        ("['more']", "message 1 of the environment is 'more'"),
        ("[{'role': 'user', 'content': 'x'}] * 101", "returned 101 messages"),
        ("{'role': 'assistant', 'content': 'x'}", "has the role 'assistant'"),
        ("{'role': 'user', 'content': 1}", "has a content that is '1' \\(int\\)"),
        ("{'role': 'user'}", "has no content"),
        ("{'role': 'user', 'content': '', 'tool_calls': []}", "has the field 'tool_calls'"),
        ("'\\ud800'", "half of a surrogate pair in its content, at character 0"),
        ("'x' * 10_000_000", "messages of 100000.. bytes"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("exit(3)", "SystemExit: 3"),
    ],
)
async def test_step_may_not_return(tmp_path, result, reason):
    process = EnvironmentProcess(write(tmp_path, stepping(result)))
    await process.start()
    await process.call("reset", "one", task="{}")
    with pytest.raises(CallFailed, match=reason):
        await process.call("step", "one", 1, text="", calls=[], problem=None)
    assert process.ended is None
    await process.close()


async def test_a_traceback_shows_the_users_frames_alone(tmp_path):
    process = EnvironmentProcess(write(tmp_path, stepping("1 / 0")))
    await process.start()
    await process.call("reset", "one", task="{}")
    with pytest.raises(CallFailed) as failed:
        await process.call("step", "one", 1, text="", calls=[], problem=None)
    assert str(tmp_path / "mine.py") in str(failed.value)
    assert str(REPOSITORY / "engines") not in str(failed.value)
    await process.close()


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


@pytest.mark.parametrize(
    ("one", "content", "failed"),
    [
        (call("divide", a=1, b=4), "0.25", 0),
        (call("divide", a=1, b=0), "Error: ZeroDivisionError: division by zero", 1),
        (call("divide", a="1", b=4), NO_NUMBER, 1),
        (call("divide", a=1), "divide needs the argument 'b'.", 1),
        (call("divide", a=1, b=1, c=1), "divide has no argument 'c'. It takes a, b.", 1),
        (call("wait", s=0), '{"waited": 0, "note": null}', 0),
        (call("wait", s=0, note=None), '{"waited": 0, "note": null}', 0),
        (call("leave"), "Error: SystemExit: bye", 1),
        (call("pick", colour="red"), "red []", 0),
        (call("pick", colour="green"), NO_COLOUR, 1),
        (call("lost", key=[3]), "Error: TypeError: unhashable type: 'list'", 1),
        (call("add"), "There is no tool 'add'. The tools: divide, wait, leave, pick, lost.", 1),
    ],
)  # fmt: skip
async def test_a_call_of_a_tool_is_answered(tmp_path, one, content, failed):
    answer = await answer_to(write(tmp_path, TOOLS), TurnText("", (one,)))
    message = {"role": "tool", "name": one.name, "content": content}
    assert answer == EnvironmentAnswer((message,), num_calls=1, num_failed_calls=failed)


async def test_tools_alone_answer_in_order_and_end_without_a_call(tmp_path):
    config = write(tmp_path, TOOLS)
    calls = (call("wait", s=0.2), call("divide", a=1, b=0), call("divide", a=1, b=1))
    answer = await answer_to(config, TurnText("", calls))
    assert [message["name"] for message in answer.messages] == ["wait", "divide", "divide"]
    assert (answer.num_calls, answer.num_failed_calls) == (3, 1)
    assert await answer_to(config, TurnText("4")) == EnvironmentAnswer(ended=True)
    told = EnvironmentAnswer(({"role": "tool", "content": "no JSON"},), None, False, 1, 1)
    assert await answer_to(config, TurnText("", (), "no JSON")) == told


METHODS = """
class Account:
    def __init__(self, start): self.total = start
    def add(self, amount: int): self.total += amount; return self.total
    async def slow(self): return "slept"
    tools = [add, slow]
"""


@pytest.mark.parametrize("name", ["Account", "Savings"])
async def test_a_tool_may_be_a_method_and_gets_the_conversations_object(tmp_path, name):
    body = f"{METHODS}\nclass Savings(Account): pass\n"
    config = write(tmp_path, body, name=name, kwargs={"start": 3})
    turns = [TurnText("", (call("add", amount=n),)) for n in (1, 10)]
    assert (await answer_to(config, *turns)).messages[0]["content"] == "14"


@pytest.mark.parametrize(
    "define",
    [
        "def step(self, turn): return turn.run()",
        "async def step(self, turn): return await turn.run_async()",
    ],
)
async def test_a_step_may_run_the_calls(tmp_path, define):
    body = f"{METHODS}\n    {define}\n"
    turn = TurnText("", (call("add", amount=1), call("slow"), call("fly")))
    answer = await answer_to(write(tmp_path, body, kwargs={"start": 0}), turn)
    assert [message["content"] for message in answer.messages][:2] == ["1", "slept"]
    assert (answer.num_calls, answer.num_failed_calls) == (3, 1)


async def test_an_async_step_is_told_to_run_async_tools_with_run_async(tmp_path):
    body = f"{METHODS}\n    async def step(self, turn): return turn.run()\n"
    process = EnvironmentProcess(write(tmp_path, body, kwargs={"start": 0}))
    await process.start()
    await process.call("reset", "one", task="{}")
    turn = {"text": "", "calls": [{"name": "slow", "arguments": {}}], "problem": None}
    with pytest.raises(CallFailed, match=r"await turn\.run_async"):
        await process.call("step", "one", 1, **turn)
    await process.close()


@pytest.mark.parametrize(
    ("body", "changes", "reason"),
    [
        ("1 / 0", {}, "mine.py cannot be imported: ZeroDivisionError"),
        ("exit(3)", {}, "mine.py ends the process that imports it: 3"),
        ("import os; os._exit(3)", {}, r"mine.py ends the process that imports it: .*exit code 3"),
        ("x = 1", {}, "mine.py has no environment: write a class with `step`"),
        ("tools = []", {}, "list of tools in .*mine.py is empty"),
        (stepping("1") + stepping("2").replace("Mine", "Other"), {}, r"\(Mine, Other\): set env"),
        (stepping("1"), {"name": "Other"}, r"has no 'Other' \(it has Mine\)"),
        (stepping("1"), {"kwargs": {"a": 1}}, "Mine in .* cannot be created with a"),
        ("def f(): 1\ntools = [f]", {"kwargs": {"a": 1}}, "mine.py has tools alone"),
        ("def f(*a): 1\ntools = [f]", {}, r"the tool f: \*a cannot be given by name"),
        ("def f(a: set): 1\ntools = [f]", {}, "the tool f: .*cannot be written as JSON"),
        ("def f(a: 'No'): 1\ntools = [f]", {}, "the tool f has unusable annotations"),
        ("def f(): 1\ntools = [f, f]", {}, "two tools are called f"),
        ("tools = ['f']", {}, "the tool 'f' .* is not a function"),
    ],
)
async def test_a_file_that_cannot_be_used_is_refused(tmp_path, body, changes, reason):
    pool = EnvironmentPool(write(tmp_path, body, **changes))
    with pytest.raises(ValueError, match=reason):
        await pool.start()


async def test_a_name_chooses_among_several(tmp_path):
    body = stepping("'mine'") + stepping("'other'").replace("Mine", "Other") + TOOLS
    other = write(tmp_path, body, name="Other")
    assert await answer_to(other, TurnText("")) == EnvironmentAnswer((said("other"),))
    tools = other.model_copy(update={"name": "tools"})
    assert await answer_to(tools, TurnText("")) == EnvironmentAnswer(ended=True)


async def test_a_variable_that_is_not_set_is_refused(tmp_path):
    pool = EnvironmentPool(write(tmp_path, stepping("1"), variables=["NO_SUCH_KEY"]))
    with pytest.raises(ValueError, match=r"environment\.variables names NO_SUCH_KEY, which is not"):
        await pool.start()


async def test_a_missing_file_is_refused(tmp_path):
    pool = EnvironmentPool(EnvironmentConfig(path=tmp_path / "none.py", processes=1))
    with pytest.raises(ValueError, match=r"none\.py does not exist"):
        await pool.start()


def typed(a: int, b: "str | None" = None, c: list[float] | None = None, d: dict = {}):  # noqa: B006
    """Try types."""
    return a, b, c, d


def test_a_schema_has_types_defaults_and_the_docstring():
    schema = declared_tools([typed])["typed"].schema["function"]
    assert schema["description"] == "Try types."
    assert schema["parameters"] == {
        "type": "object",
        "required": ["a"],
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "string"},
            "c": {"type": "array", "items": {"type": "number"}},
            "d": {"type": "object"},
        },
    }


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({"a": 1}, True),
        ({"a": 1, "b": None, "c": [1, 2.5], "d": {"x": []}}, True),
        ({"a": True}, False),
        ({"a": 1.0}, False),
        ({"a": 1, "c": ["x"]}, False),
        ({"a": 1, "d": None}, False),
        ([1], False),
    ],
)
def test_arguments_must_have_the_declared_types(arguments, fits):
    problem = call_problem(declared_tools([typed])["typed"], arguments)
    assert (problem is None) == fits


def test_values_of_a_task_survive_json():
    task = {"at": [b"x", (1, 2)], "refrain.type": "mine", "n": 1.5}
    assert json.loads(json.dumps(to_json(task)), object_hook=from_json) == task
    with pytest.raises(ValueError, match="cannot receive a set"):
        to_json({"a": {1}})


@pytest.mark.parametrize("name", WORKER_MODULES)
def test_the_worker_needs_python_3_9_and_the_standard_library(name):
    source = (REPOSITORY / "engines" / f"{name.replace('.', '/')}.py").read_text()
    tree = ast.parse(source, feature_version=(3, 9))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    roots = {one.partition(".")[0] for one in imported}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    roots |= {str(node.module).partition(".")[0] for node in found if node.level == 0}
    assert roots - {"__future__"} <= sys.stdlib_module_names
    room = f"{name.partition('.')[0]}."
    own = {(room if node.level == 1 else "") + str(node.module) for node in found if node.level}
    assert own <= set(WORKER_MODULES)


async def test_another_interpreter_runs_the_file_with_its_own_packages(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    get = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", get], check=True, capture_output=True, text=True)
    (Path(site.stdout.strip()) / "only_there.py").write_text("WHERE = 'there'\n")
    head = "import only_there\ntry:\n    import pydantic\nexcept ImportError: pydantic = None"
    config = write(tmp_path, stepping("f'{only_there.WHERE} {pydantic}'", head), python=python)
    assert await answer_to(config, TurnText("")) == EnvironmentAnswer((said("there None"),))


async def test_a_users_modules_are_the_users(tmp_path):
    """A module beside the user's file wins over a refrain package of the same name. It does not
    replace a module of the standard library."""
    for name in ("schemas", "engines", "worker", "json"):
        (tmp_path / f"{name}.py").write_text("WHOSE = 'mine'\n")
    names = "schemas, engines, worker, json"
    body = stepping(f"str([getattr(m, 'WHOSE', 0) for m in ({names})])", f"import {names}")
    answer = await answer_to(write(tmp_path, body), TurnText(""))
    assert answer.messages[0]["content"] == "['mine', 'mine', 'mine', 0]"


def test_the_worker_starts_without_site_packages(tmp_path):
    _, *command = worker_command(sys.executable, "environment", 0)
    assert Path(command[2]) == REPOSITORY / "engines"
    command[1] = command[1].replace("main(int(descriptor))", "print(main.__module__)")
    run = [sys.executable, "-I", "-S", *command]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == "_refrain.environment.worker\n"
