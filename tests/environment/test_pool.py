"""Environments in real worker processes: what they return, how they fail, and who asks twice."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engines.environment.pool import Diverged, EnvironmentFailed, EnvironmentPool
from schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentTask,
    ToolCall,
    TurnText,
)

TASK = EnvironmentTask("p", "mine", "42", {}, seed=7)
TOOLS = '''
import time

def multiply(a: int, b: int) -> int:
    """Product of two numbers."""
    return a * b

def divide(a: float, b: float = 1.0):
    return a / b

async def later(text: str):
    return text + "!"

tools = [multiply, divide, later]
'''
GUESS = """
import random

class Guess:
    def reset(self, task):
        self.number = random.Random(task.seed).randint(1, 20)
        self.tries = 0

    def step(self, turn):
        self.tries += 1
        if int(turn.text) == self.number:
            return {"score": 1.0}
        return f"{'higher' if int(turn.text) < self.number else 'lower'} after {self.tries}"

    def end(self, reason):
        return {"turns": -0.5}.get(reason, -1.0)
"""
NUMBER = 11
"""The number of seed 7."""
AS_TOLD = '''
import asyncio, os, signal, sys, time

class AsTold:
    """Does what a turn says, in Python."""
    def reset(self, task):
        self.count = 0
    def step(self, turn):
        self.count += 1
        found = {"self": self}
        exec("result = 'ok'\\n" + turn.text, globals(), found)
        return found["result"]
    def close(self):
        time.sleep(0)
'''


def run(
    tmp_path: Path,
    source: str,
    test: Callable[[EnvironmentPool], Awaitable[Any]],
    **settings: Any,
) -> Any:
    path = tmp_path / "environment.py"
    path.write_text(source)

    async def whole() -> Any:
        given = {"processes": 1, "timeout_s": 2.0, "retries": 0} | settings
        pool = EnvironmentPool(EnvironmentConfig(path=path, **given))
        try:
            await pool.start()
            return await test(pool)
        finally:
            await pool.close()

    return asyncio.run(whole())


async def told(pool: EnvironmentPool, *texts: str, sample: str = "s") -> list[EnvironmentAnswer]:
    """Return the answers to the turns of a conversation."""
    turns = [TurnText(text) for text in texts]
    answers: list[EnvironmentAnswer] = []
    for number in range(len(turns)):
        answers.append(await pool.answer(sample, TASK, turns[: number + 1], answers))
    return answers


def contents(answer: EnvironmentAnswer) -> list[str]:
    return [message["content"] for message in answer.messages]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


def test_tools_are_executed_and_an_answer_without_a_call_ends(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        calls = (call("multiply", a=6, b=7), call("divide", a=1), call("later", text="so"))
        turns = [TurnText("let me see", calls), TurnText("It is 42.")]
        first = await pool.answer("s", TASK, turns[:1], [])
        return [first, await pool.answer("s", TASK, turns, [first])]

    first, second = run(tmp_path, TOOLS, test)
    assert contents(first) == ["42", "1.0", "so!"]
    assert {message["role"] for message in first.messages} == {"tool"}
    assert (first.num_calls, first.num_failed_calls) == (3, 0)
    assert (second.ended, second.score) == (True, None)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (call("add", a=1), "There is no tool 'add'. There are: multiply, divide, later."),
        (
            call("multiply", a=6),
            "multiply(a: int, b: int) -> int: missing a required argument: 'b'.",
        ),
        (call("multiply", a="6", b=7), "multiply: a must be of type integer, not '6'."),
        (call("divide", a=1, b=0), "ZeroDivisionError: float division by zero"),
    ],
)
def test_what_is_wrong_with_a_call_is_its_observation(
    tmp_path: Path, one: ToolCall, expected: str
) -> None:
    async def test(pool: EnvironmentPool) -> EnvironmentAnswer:
        return await pool.answer("s", TASK, [TurnText("", (one, call("multiply", a=2, b=3)))], [])

    answer = run(tmp_path, TOOLS, test)
    assert contents(answer) == [expected, "6"]
    assert (answer.num_calls, answer.num_failed_calls) == (2, 1)


def test_a_turn_whose_calls_cannot_be_read_is_answered(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> EnvironmentAnswer:
        return await pool.answer("s", TASK, [TurnText("<tool_call>", problem="Close it.")], [])

    assert contents(run(tmp_path, TOOLS, test)) == ["Close it."]


def test_schemas_come_from_signatures_and_docstrings(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> tuple[dict[str, Any], ...]:
        return (await pool.start()).tools

    multiply, divide, _ = (tool["function"] for tool in run(tmp_path, TOOLS, test))
    assert multiply == {
        "name": "multiply",
        "description": "Product of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
    assert divide["parameters"]["required"] == ["a"]


def test_a_class_answers_and_scores(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        return await told(pool, "1", "20", str(NUMBER))

    first, second, third = run(tmp_path, GUESS, test)
    assert contents(first) == ["higher after 1"]
    assert contents(second) == ["lower after 2"]
    assert (third.ended, third.score) == (True, 1.0)


def test_who_is_cut_gets_the_score_of_end(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> float | None:
        known = await told(pool, "1", "2")
        turns = [TurnText("1"), TurnText("2"), TurnText("3")]
        return await pool.end("s", TASK, turns, known, "turns")

    assert run(tmp_path, GUESS, test) == -0.5


def test_an_answered_turn_may_be_the_last(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> float | None:
        known = await told(pool, "1", "2")
        return await pool.end("s", TASK, [TurnText("1"), TurnText("2")], known, "turns")

    assert run(tmp_path, GUESS, test) == -0.5


def test_a_repeated_question_is_answered_once(tmp_path: Path) -> None:
    """`tries` would be 2 if the step was executed twice."""

    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        both = [pool.answer("s", TASK, [TurnText("1")], []) for _ in range(2)]
        found = list(await asyncio.gather(*both))
        return [*found, await pool.answer("s", TASK, [TurnText("1")], [])]

    answers = run(tmp_path, GUESS, test)
    assert [contents(answer) for answer in answers] == [["higher after 1"]] * 3


def test_who_asked_first_may_be_cancelled(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        first = asyncio.create_task(told(pool, "time.sleep(0.3)", sample="s"))
        await asyncio.sleep(0.1)
        first.cancel()
        return await told(pool, "time.sleep(0.3)", "result = str(self.count)", sample="s")

    assert contents(run(tmp_path, AS_TOLD, test)[1]) == ["2"]


def test_a_lost_conversation_is_replayed(tmp_path: Path) -> None:
    """Also after another one has hung in its process."""

    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        known = await told(pool, "1", "2")
        os.kill(worker_of(pool), signal.SIGKILL)
        turns = [TurnText("1"), TurnText("2"), TurnText("3")]
        return [*known, await pool.answer("s", TASK, turns, known)]

    answers = run(tmp_path, GUESS, test, retries=1)
    assert [contents(answer) for answer in answers][2] == ["higher after 3"]


def test_a_hang_costs_only_its_own_conversation(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> tuple[Any, Any]:
        waits = ["time.sleep(0.4)"] * 4
        others = [told(pool, *waits, "result = str(self.count)", sample=f"{i}") for i in range(3)]
        hangs = told(pool, "while True: time.sleep(1)", sample="hangs")
        *fine, failed = await asyncio.gather(*others, hangs, return_exceptions=True)
        return fine, failed

    began_s = time.monotonic()
    fine, failed = run(tmp_path, AS_TOLD, test, timeout_s=1.0)
    assert time.monotonic() - began_s < 15.0
    assert [contents(answers[-1]) for answers in fine] == [["5"]] * 3
    assert "no answer to step within 1 s (environment.timeout_s)" in str(failed)


def test_a_replay_that_differs_is_reported(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> None:
        known = await told(pool, "result = str(os.getpid())")
        os.kill(worker_of(pool), signal.SIGKILL)
        await told_again(pool, known)

    async def told_again(pool: EnvironmentPool, known: list[EnvironmentAnswer]) -> None:
        turns = [TurnText("result = str(os.getpid())"), TurnText("")]
        await pool.answer("s", TASK, turns, known)

    with pytest.raises(Diverged, match="another answer when turn 1 was replayed"):
        run(tmp_path, AS_TOLD, test, retries=1)


def test_what_cannot_be_replayed_fails(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> None:
        known = await told(pool, "1")
        os.kill(worker_of(pool), signal.SIGKILL)
        await pool.answer("s", TASK, [TurnText("1"), TurnText("2")], known)

    source = GUESS.replace("class Guess:", "class Guess:\n    replays = False")
    with pytest.raises(EnvironmentFailed, match="replays = False"):
        run(tmp_path, source, test, retries=1)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("raise KeyError('no')", "KeyError: 'no'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise StopIteration", "StopIteration"),
        ("os._exit(3)", r"ended its process \(exit code 3\)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("time.sleep(60)", "no answer to step within 2 s"),
        ("result = float('nan')", "the score is 'nan'"),
        ("result = {'score': '1'}", "the score is '1'"),
        ("result = {'reward': 1}", "without 'messages' and 'score'"),
        ("result = 'a' * 10_000_000", "10,000,000 characters"),
        ("result = '\\ud800'", "not valid UTF-8"),
        ("result = [{'role': 'assistant', 'content': 'I won'}]", "its role must be one of"),
        ("result = [{'role': 'user', 'content': 5}]", "it must be a text"),
        ("result = []", "return a text, or 1 to 256 messages"),
        ("result = object()", "it must be a number within"),
    ],
)
def test_malformed_steps_are_named_in_time(tmp_path: Path, turn: str, reason: str) -> None:
    """The next conversation is answered."""

    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        began_s = time.monotonic()
        with pytest.raises(EnvironmentFailed, match=reason):
            await told(pool, "result = 'fine'", turn)
        assert time.monotonic() - began_s < 4.0
        return await told(pool, "result = 'fine'", sample="next")

    assert contents(run(tmp_path, AS_TOLD, test)[0]) == ["fine"]


def test_a_child_that_returns_from_a_fork_does_no_harm(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        return await told(pool, "result = str(os.fork() and 'parent' or 'child')", "result = '2'")

    assert [contents(answer) for answer in run(tmp_path, AS_TOLD, test)] == [["parent"], ["2"]]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('no file')", "cannot be imported: OSError: no file"),
        ("import sys; sys.exit(4)", "cannot be imported: SystemExit: 4"),
        ("import os; os._exit(4)", "ends the process that imports it"),
        ("x = 1", "neither a class with `step` nor a list `tools`"),
        ("class A:\n    def step(self): ...\nclass B:\n    def step(self): ...", "several classes"),
        ("def f(*args): ...\ntools = [f]", "give args a name of its own"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, source: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        run(tmp_path, source, lambda pool: pool.start())


@pytest.mark.parametrize("method", ["reset", "close"])
def test_reset_and_close_may_raise(tmp_path: Path, method: str) -> None:
    source = GUESS + f"\n    def {method}(self, *args): raise RuntimeError('broken {method}')\n"

    async def test(pool: EnvironmentPool) -> list[EnvironmentAnswer]:
        answers = await told(pool, "1")
        await pool.forget(["s"])
        return answers + await told(pool, "1", sample="next")

    if method == "reset":
        with pytest.raises(EnvironmentFailed, match="broken reset"):
            run(tmp_path, source, test)
    else:
        assert len(run(tmp_path, source, test)) == 2


def test_coroutines_run_beside_each_other(tmp_path: Path) -> None:
    source = """
import asyncio
class Slow:
    async def step(self, turn):
        await asyncio.sleep(0.5)
        return 1.0
"""

    async def test(pool: EnvironmentPool) -> float:
        began_s = time.monotonic()
        await asyncio.gather(*(told(pool, "x", sample=f"{i}") for i in range(20)))
        return time.monotonic() - began_s

    assert run(tmp_path, source, test) < 5.0


def test_no_process_is_left(tmp_path: Path) -> None:
    async def test(pool: EnvironmentPool) -> int:
        await told(pool, "import subprocess; subprocess.Popen(['sleep', '1000'])")
        return worker_of(pool)

    pid = run(tmp_path, AS_TOLD, test)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def worker_of(pool: EnvironmentPool) -> int:
    """Return the process id of the pool's only worker."""
    group = pool._processes[0]._group
    assert group is not None
    return group
