"""A worker process: each way to break it is named in time, and nothing is left running."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from refrain.engines.environment.process import Blame, CallFailed, EnvironmentProcess, ProcessEnded
from refrain.schemas.environment import EnvironmentConfig
from tests.conftest import REPOSITORY

TIMEOUT_S = 1.0
NAMED_S = TIMEOUT_S + 2.0
"""Time in which each fault must be named."""
WAIT_S = 20.0
HEAD = "import asyncio, ctypes, gc, os, sys, threading, time\nREFRAIN = int(sys.argv[-1])\n"
TURN: dict[str, Any] = {"text": "", "calls": [], "problem": None}


def write(directory: Path, define: str, **changes: Any) -> EnvironmentConfig:
    """Write a class whose `step` runs `turn.text` as code."""
    path = directory / "mine.py"
    path.write_text(f"{HEAD}\nclass Mine:\n    {define}\n")
    return EnvironmentConfig(path=path, **{"timeout_s": TIMEOUT_S} | changes)


PLAIN = "def step(self, turn): exec(turn.text); return 'more'"
ASYNC = "async def step(self, turn): exec(turn.text); return 'more'"
SLEEPS = "async def step(self, turn): await asyncio.sleep(float(turn.text)); return 'more'"


@asynccontextmanager
async def started(config: EnvironmentConfig, **changes: Any) -> AsyncIterator[EnvironmentProcess]:
    """Yield a process with conversations `one` and `two`."""
    process = EnvironmentProcess(config, **changes)
    await process.start()
    try:
        for name in ("one", "two"):
            await process.call("reset", name, task="{}")
        yield process
    finally:
        await process.close()


async def step(process: EnvironmentProcess, text: str, name: str = "one") -> Any:
    return await process.call("step", name, 1, **TURN | {"text": text})


async def failure(process: EnvironmentProcess, text: str, name: str = "one") -> ProcessEnded:
    with pytest.raises(ProcessEnded) as ended:
        await step(process, text, name)
    return ended.value


STOOD_STILL = r"no answer within 1 s \(environment.timeout_s\)"
BLOCKED = r"stood still for 1 s \(environment.timeout_s\)"


@pytest.mark.parametrize(
    ("define", "text", "reason"),
    [
        (PLAIN, "time.sleep(60)", STOOD_STILL),
        (ASYNC, "time.sleep(60)", BLOCKED),
        (PLAIN, "os._exit(3)", r"ended its process \(exit code 3\)"),
        (ASYNC, "os._exit(3)", r"ended its process \(exit code 3\)"),
        (PLAIN, "os.kill(os.getpid(), 9)", "ended by SIGKILL, as Linux does"),
        (PLAIN, "os.kill(os.getpid(), 19)", BLOCKED),
        (PLAIN, "ctypes.string_at(0)", "ended by SIGSEGV"),
        (PLAIN, "os.write(REFRAIN, b'hello\\n')", "wrote to refrain's socket: no valid reply"),
        (PLAIN, "os.write(REFRAIN, b'\\xff\\n')", "wrote to refrain's socket: no valid reply"),
        (PLAIN, "os.write(REFRAIN, b'[' * 100_000 + b'\\n')", "wrote to refrain's socket"),
        (PLAIN, "while True: os.write(REFRAIN, b'0' * 2**16)", "wrote to refrain's socket"),
        (PLAIN, "os.close(REFRAIN); time.sleep(60)", "closed refrain's socket|stood still"),
    ],
)
async def test_a_call_that_breaks_the_process_is_named_in_time(tmp_path, define, text, reason):
    async with started(write(tmp_path, define)) as process:
        began_s = time.monotonic()
        with pytest.raises(ProcessEnded, match=reason) as ended:
            await step(process, text)
        assert time.monotonic() - began_s < NAMED_S
        assert ended.value.blame == Blame.OWN
        with pytest.raises(ProcessEnded, match=reason):
            await step(process, "")


async def test_a_reply_for_another_turn_is_no_reply(tmp_path):
    forge = (
        "from _refrain.environment.worker import line_of\n"
        "os.write(REFRAIN, line_of('done', 'f' * 32, 'two', 1, None))"
    )
    async with started(write(tmp_path, PLAIN)) as process:
        assert "a call that was not running" in str(await failure(process, forge))


async def test_a_slow_async_call_fails_alone(tmp_path):
    async with started(write(tmp_path, SLEEPS)) as process:
        other = asyncio.create_task(step(process, "0.5", "two"))
        with pytest.raises(CallFailed, match=STOOD_STILL):
            await step(process, "60")
        assert (await other)["messages"][0]["content"] == "more"
        assert process.ended is None


async def test_who_hangs_is_blamed_and_the_others_are_not(tmp_path):
    async with started(write(tmp_path, PLAIN)) as process:
        hangs = asyncio.create_task(failure(process, "time.sleep(60)"))
        await asyncio.sleep(0.3)
        other = asyncio.create_task(failure(process, "time.sleep(0.95)", "two"))
        assert (await hangs).blame == Blame.OWN
        assert (await other).blame == Blame.OTHER


@pytest.mark.parametrize("text", ["time.sleep(60)", "os._exit(3)"])
async def test_of_several_calls_on_the_loop_nobody_is_blamed(tmp_path, text):
    define = (
        "async def step(self, turn):\n"
        "        await asyncio.sleep(0.3 if turn.text else 60); exec(turn.text)"
    )
    async with started(write(tmp_path, define)) as process:
        calls = (failure(process, text), failure(process, "", "two"))
        assert {one.blame for one in await asyncio.gather(*calls)} == {Blame.UNKNOWN}


@pytest.mark.parametrize("fork", ["os.fork()", "ctypes.CDLL(None).fork()"])
@pytest.mark.parametrize("define", [PLAIN, ASYNC])
async def test_code_that_forks_and_returns_twice_answers_once(tmp_path, fork, define):
    async with started(write(tmp_path, define, timeout_s=10.0)) as process:
        worker = worker_of(process)
        for _ in range(3):
            text = f"if {fork} == 0: time.sleep(0.05)"
            assert (await step(process, text))["messages"][0]["content"] == "more"
        await until(lambda: not alive_children(worker), "the children end")
        assert (await step(process, ""))["ended"] is False


async def test_a_child_that_stays_is_killed_with_the_process(tmp_path):
    async with started(write(tmp_path, PLAIN, timeout_s=10.0)) as process:
        await step(process, "if os.fork() == 0: os.setsid(); time.sleep(600)")
        (child,) = worker_of(process).children()
    assert not child.is_running()


@pytest.mark.parametrize("who", ["worker", "guard"])
@pytest.mark.parametrize("idle", [True, False])
async def test_a_killed_worker_or_guard_is_named(tmp_path, who, idle):
    async with started(write(tmp_path, PLAIN, timeout_s=60.0)) as process:
        worker = worker_of(process)
        victim = worker if who == "worker" else psutil.Process(worker.ppid())
        call = None if idle else asyncio.create_task(failure(process, "time.sleep(600)"))
        await asyncio.sleep(0.2)
        victim.kill()
        began_s = time.monotonic()
        if call is not None:
            assert "ended by SIGKILL" in str(await call)
        await until(lambda: process.ended, "the end is noticed")
        assert time.monotonic() - began_s < NAMED_S
        await until(lambda: not worker.is_running(), "the worker ends")


async def test_nothing_outlives_a_parent_that_was_killed(tmp_path):
    write(tmp_path, PLAIN)
    code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from refrain.engines.environment.process import EnvironmentProcess\n"
        "from refrain.schemas.environment import EnvironmentConfig\n"
        "async def main():\n"
        "    process = EnvironmentProcess(EnvironmentConfig(path=Path(sys.argv[1])))\n"
        "    await process.start(); print('ready', flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, tmp_path / "mine.py"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    assert await asyncio.to_thread(parent.stdout.readline) == b"ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 2, "expected the guard and the worker"
    parent.kill()
    parent.wait(WAIT_S)
    parent.stdout.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=WAIT_S)
    assert alive == []


async def test_a_file_that_is_imported_too_slowly_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("refrain.engines.environment.process.START_TIMEOUT_S", 1.0)
    process = EnvironmentProcess(write(tmp_path, "pass\ntime.sleep(60)"))
    began_s = time.monotonic()
    with pytest.raises(ValueError, match=r"mine\.py was not imported within 1 s"):
        await process.start()
    assert time.monotonic() - began_s < WAIT_S


async def test_calls_run_together_but_no_more_than_at_once(tmp_path):
    define = (
        "running = most = 0\n"
        "    async def step(self, turn):\n"
        "        Mine.running += 1; Mine.most = max(Mine.most, Mine.running)\n"
        "        await asyncio.sleep(0.05); Mine.running -= 1; return str(Mine.most)"
    )
    async with started(write(tmp_path, define, at_once=3, timeout_s=10.0)) as process:
        answers = await asyncio.gather(*(step(process, "") for _ in range(9)))
    assert max(int(one["messages"][0]["content"]) for one in answers) == 3


async def test_the_code_sees_the_variables_that_are_named_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "1")
    monkeypatch.setenv("JUDGE_KEY", "2")
    define = "def step(self, turn): return str(sorted(os.environ))"
    config = write(tmp_path, define, variables=["JUDGE_KEY"])
    async with started(config, surroundings={"LANG": "C.UTF-8", "REFRAIN_DATE": "x"}) as process:
        seen = (await step(process, ""))["messages"][0]["content"]
    assert {"PATH", "JUDGE_KEY", "REFRAIN_DATE"} <= set(ast_list(seen))
    assert "SECRET_KEY" not in ast_list(seen)


async def test_a_memory_limit_that_is_reached_is_named(tmp_path):
    config = write(tmp_path, PLAIN, max_memory_bytes=1_000_000_000, timeout_s=10.0)
    async with started(config) as process:
        with pytest.raises(CallFailed, match=r"environment\.max_memory_bytes is 1000000000"):
            await step(process, "bytearray(2_000_000_000)")


async def test_a_process_that_reads_nothing_is_named(tmp_path):
    """The call is too large for the socket's buffer."""
    async with started(write(tmp_path, PLAIN)) as process:
        worker_of(process).send_signal(signal.SIGSTOP)
        assert "stood still for 1 s" in str(await failure(process, "#" * 10_000_000))


def worker_of(process: EnvironmentProcess) -> psutil.Process:
    assert process._group is not None
    return psutil.Process(process._group)


def alive_children(process: psutil.Process) -> list[psutil.Process]:
    return [one for one in process.children() if one.status() != psutil.STATUS_ZOMBIE]


def ast_list(text: str) -> list[str]:
    return [one.strip(" '") for one in text.strip("[]").split(",")]


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)
