"""The pool: each turn once, replay, and failures that touch nobody else."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from refrain.engines.environment.pool import (
    CannotReplay,
    Diverged,
    EnvironmentFailed,
    EnvironmentPool,
    parsed_answer,
)
from refrain.schemas.environment import (
    EnvironmentAnswer,
    EnvironmentConfig,
    EnvironmentTask,
    ToolCall,
    TurnText,
)

TIMEOUT_S = 1.0
LOGS = """
import asyncio, os, random, sys, time
from pathlib import Path
LOG = Path(__file__).with_name("log")

def log(*words):
    with LOG.open("a") as file:
        file.write(" ".join(map(str, words)) + "\\n")

def run(text, head):
    exec(text.partition(":")[2] if text.startswith(head + ":") else "")
"""
COUNTS = f"""{LOGS}
class Counts:
    def reset(self, task):
        log("reset", task.prompt_key)
        self.key, self.total = task.prompt_key, 0
        run(self.key, "reset")
    def step(self, turn):
        log("step", self.key, turn.text)
        self.total += 1
        run(turn.text, "step")
        return f"{{self.total}} {{turn.text}}"
    def end(self, reason):
        run(reason, "end")
        return float(self.total)
    def close(self):
        log("close", self.key)
        run(self.key, "close")
"""
"""Class that runs code in its prompt key, turn or reason, such as `step:1/0`."""


def write(directory: Path, body: str = COUNTS, **changes: Any) -> EnvironmentConfig:
    path = directory / "mine.py"
    path.write_text(body)
    return EnvironmentConfig(path=path, **{"timeout_s": TIMEOUT_S, "processes": 1} | changes)


@asynccontextmanager
async def started(config: EnvironmentConfig) -> AsyncIterator[EnvironmentPool]:
    pool = EnvironmentPool(config)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def logged(config: EnvironmentConfig) -> list[str]:
    log = config.path.with_name("log")
    return log.read_text().splitlines() if log.exists() else []


def task_of(sample: str, seed: int = 1) -> EnvironmentTask:
    return EnvironmentTask(sample, "mine", None, {}, seed)


def turns_of(*texts: str) -> list[TurnText]:
    return [TurnText(text) for text in texts]


def observed(*contents: str) -> list[EnvironmentAnswer]:
    return [EnvironmentAnswer(({"role": "user", "content": one},)) for one in contents]


async def converse(
    pool: EnvironmentPool, sample: str, *texts: str, known: int = 0
) -> list[EnvironmentAnswer]:
    """Return the answers to these turns, asked for one by one after the first `known`."""
    turns = turns_of(*texts)
    recorded = observed(*(f"{number} {text}" for number, text in enumerate(texts[:known], 1)))
    for number in range(known + 1, len(turns) + 1):
        recorded.append(await pool.answer(sample, task_of(sample), turns[:number], recorded))
    return recorded


async def test_a_turn_is_executed_once_however_often_it_is_asked_for(tmp_path):
    config = write(tmp_path, timeout_s=10.0)
    async with started(config) as pool:
        first = turns_of("step:time.sleep(0.3)")
        asked = (pool.answer("a", task_of("a"), first, []) for _ in range(5))
        answers = await asyncio.gather(*asked)
        assert answers == observed(f"1 {first[0].text}") * 5
        assert await pool.answer("a", task_of("a"), first, []) == answers[0]
        assert pool.num_answered == 1
    assert logged(config) == ["reset a", f"step a {first[0].text}"]


async def test_a_caller_that_gives_up_does_not_repeat_the_turn(tmp_path):
    config = write(tmp_path, timeout_s=10.0)
    async with started(config) as pool:
        turns = turns_of("step:time.sleep(0.3)")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.answer("a", task_of("a"), turns, []), 0.1)
        await pool.answer("a", task_of("a"), turns, [])
    assert len(logged(config)) == 2


async def test_another_pool_replays_a_conversation(tmp_path):
    config = write(tmp_path)
    async with started(config) as pool:
        known = await converse(pool, "a", "x", "y")
    async with started(config) as pool:
        assert await converse(pool, "a", "x", "y", "z", known=2) == [*known, *observed("3 z")]
    assert logged(config)[3:] == ["reset a", "step a x", "step a y", "step a z"]


async def test_a_turn_that_was_drawn_again_is_answered_again(tmp_path):
    config = write(tmp_path)
    async with started(config) as pool:
        await converse(pool, "a", "x", "y")
        assert await converse(pool, "a", "x", "other", known=1) == observed("1 x", "2 other")
        assert await converse(pool, "a", "x", "other", "z", known=2) == observed(
            "1 x", "2 other", "3 z"
        )
    replay = ["close a", "reset a", "step a x", "step a other", "step a z"]
    assert logged(config)[3:] == replay


async def test_a_replay_with_another_answer_is_named(tmp_path):
    async with started(write(tmp_path)) as pool:
        wrong = observed("1 x", "7 y")
        with pytest.raises(Diverged, match="of a answered turn 2 in another way") as diverged:
            await pool.answer("a", task_of("a"), turns_of("x", "y", "z"), wrong)
        assert (diverged.value.sample, diverged.value.turn) == ("a", 2)
        await pool.forget(["a"])
        assert await converse(pool, "a", "x") == observed("1 x")


async def test_a_class_that_cannot_replay_is_named(tmp_path):
    config = write(tmp_path, f"{COUNTS}    replays = False\n")
    async with started(config) as pool:
        assert await converse(pool, "a", "x", "y") == observed("1 x", "2 y")
        with pytest.raises(CannotReplay, match="replays = False"):
            await pool.answer("b", task_of("b"), turns_of("x", "y"), observed("1 x"))
        with pytest.raises(CannotReplay, match=r"exit code 3.*replays = False"):
            await converse(pool, "a", "x", "y", "step:os._exit(3)", known=2)
        # A first turn needs no replay.
        with pytest.raises(EnvironmentFailed, match=r"turn 1: .*exit code 3") as failed:
            await converse(pool, "c", "step:os._exit(3)")
        assert not isinstance(failed.value, CannotReplay)


ONCE = "step:Path(LOG.with_name('once')).exists() or (LOG.with_name('once').touch(), {})"


@pytest.mark.parametrize("fault", ["1/0", "os._exit(3)", "time.sleep(60)"])
async def test_a_call_that_fails_once_is_tried_again_by_replay(tmp_path, fault):
    config = write(tmp_path)
    async with started(config) as pool:
        text = ONCE.format(fault)
        assert (await converse(pool, "a", "x", text))[-1:] == observed(f"2 {text}")
    log = [line for line in logged(config) if line != "close a"]
    assert log == ["reset a", "step a x", f"step a {text}"] * 2


async def test_retries_are_counted(tmp_path):
    config = write(tmp_path, retries=2)
    async with started(config) as pool:
        with pytest.raises(EnvironmentFailed, match="division by zero") as failed:
            await converse(pool, "a", "step:1/0")
        assert (failed.value.sample, failed.value.turn) == ("a", 1)
        with pytest.raises(EnvironmentFailed, match="division by zero"):
            await converse(pool, "a", "step:1/0")
    assert logged(config).count("step a step:1/0") == 3


MALFORMED = {
    "1/0": "ZeroDivisionError",
    "time.sleep(60)": "no answer within 1 s",
    "os._exit(3)": "exit code 3",
    "sys.exit(3)": "SystemExit: 3",
    "os.kill(os.getpid(), 9)": "SIGKILL",
    "os.write(int(sys.argv[-1]), b'hello\\n')": "wrote to refrain's socket",
}


@pytest.mark.parametrize(
    ("method", "fault"),
    [("step", fault) for fault in MALFORMED]
    + [(method, fault) for method in ("reset", "end") for fault in ("1/0", "os._exit(3)")],
)
async def test_what_fails_is_named_in_time_while_the_others_go_on(tmp_path, method, fault):
    code = f"{method}:{fault}"
    async with started(write(tmp_path, processes=2, retries=0)) as pool:
        await asyncio.gather(*(converse(pool, f"o{index}", "x") for index in range(8)))
        others = [
            asyncio.create_task(converse(pool, f"o{index}", "x", "step:time.sleep(0.2)", "z"))
            for index in range(8)
        ]
        began_s = time.monotonic()
        if method == "end":
            failing = pool.end("a", task_of("a"), turns_of("x"), [], code)
        else:
            sample, turn = (code, "x") if method == "reset" else ("a", code)
            failing = pool.answer(sample, task_of(sample), turns_of(turn), [])
        with pytest.raises(EnvironmentFailed, match=MALFORMED[fault]):
            await failing
        # A process that ended under several calls is tried once more, with this call alone.
        assert time.monotonic() - began_s < TIMEOUT_S + 2.0
        wanted = observed("1 x", "2 step:time.sleep(0.2)", "3 z")
        assert await asyncio.gather(*others) == [wanted] * 8


@pytest.mark.parametrize("fault", ["1/0", "time.sleep(60)", "os._exit(3)"])
async def test_a_close_that_fails_is_logged_and_the_others_go_on(tmp_path, caplog, fault):
    sample = f"close:{fault}"
    async with started(write(tmp_path)) as pool:
        await asyncio.gather(converse(pool, sample, "x"), converse(pool, "o", "x"))
        began_s = time.monotonic()
        await pool.forget([sample, "unknown"])
        assert time.monotonic() - began_s < TIMEOUT_S + 2.0
        assert f"close() of the environment of {sample}" in caplog.text
        assert await converse(pool, "o", "x", "y", known=1) == observed("1 x", "2 y")


BLOCKS = f"""{LOGS}
class Blocks:
    async def reset(self, task): self.total = 0
    async def step(self, turn):
        self.total += 1
        await asyncio.sleep(0.2)
        run(turn.text, "step")
        return f"{{self.total}} {{turn.text}}"
"""


@pytest.mark.parametrize("fault", ["time.sleep(60)", "os._exit(3)"])
async def test_of_several_suspects_the_guilty_one_alone_fails(tmp_path, fault):
    async with started(write(tmp_path, BLOCKS, retries=0)) as pool:
        others = [asyncio.create_task(converse(pool, f"o{i}", "x", "y")) for i in range(6)]
        with pytest.raises(EnvironmentFailed):
            await converse(pool, "a", f"step:{fault}")
        assert await asyncio.gather(*others) == [observed("1 x", "2 y")] * 6


@pytest.mark.parametrize("who", ["worker", "guard"])
async def test_conversations_survive_a_killed_worker_or_guard(tmp_path, who):
    async with started(write(tmp_path, timeout_s=20.0)) as pool:
        await asyncio.gather(*(converse(pool, f"o{i}", "x") for i in range(8)))
        slow = "step:time.sleep(0.5)"
        others = [asyncio.create_task(converse(pool, f"o{i}", "x", slow, "z")) for i in range(8)]
        await asyncio.sleep(0.2)
        process = await pool._slots[0].ready()
        assert process._group is not None
        worker = psutil.Process(process._group)
        (worker if who == "worker" else psutil.Process(worker.ppid())).kill()
        assert await asyncio.gather(*others) == [observed("1 x", f"2 {slow}", "3 z")] * 8


async def test_a_conversation_that_was_cut_is_ended_once(tmp_path):
    config = write(tmp_path)
    async with started(config) as pool:
        known = await converse(pool, "a", "x", "y")
        turns = turns_of("x", "y", "cut")
        ends = (pool.end("a", task_of("a"), turns, known, "tokens") for _ in range(3))
        assert await asyncio.gather(*ends) == [2.0] * 3
    async with started(config) as pool:
        assert await pool.end("a", task_of("a"), turns, known, "tokens") == 2.0


async def test_forgotten_conversations_are_closed_and_start_anew(tmp_path):
    config = write(tmp_path)
    async with started(config) as pool:
        assert await converse(pool, "a", "x", "y") == observed("1 x", "2 y")
        await pool.forget(["a", "b"])
        assert await converse(pool, "a", "x") == observed("1 x")
    assert logged(config) == ["reset a", "step a x", "step a y", "close a", "reset a", "step a x"]


async def test_a_group_shares_its_start(tmp_path):
    body = (
        f"{LOGS}\nclass Draws:\n"
        "    def reset(self, task): self.number = random.Random(task.seed).random()\n"
        "    def step(self, turn): return str(self.number)\n"
    )
    async with started(write(tmp_path, body, processes=2)) as pool:
        asked = [pool.answer(f"a{i}", task_of("a", 3), turns_of("x"), []) for i in range(4)]
        group = await asyncio.gather(*asked)
        other = await pool.answer("b", task_of("b", 4), turns_of("x"), [])
    assert group == [group[0]] * 4
    assert other != group[0]


async def test_tools_alone_need_no_replay(tmp_path):
    body = f"{LOGS}\ndef double(n: int):\n    log('double', n); return 2 * n\ntools = [double]\n"
    config = write(tmp_path, body)
    turns = [TurnText("", (ToolCall("double", {"n": n}),)) for n in (1, 2, 3)]
    async with started(config) as pool:
        answer = await pool.answer("a", task_of("a"), turns, observed("2", "4"))
        assert answer.messages == ({"role": "tool", "name": "double", "content": "6"},)
        assert await pool.end("a", task_of("a"), turns, observed("2", "4"), "turns") is None
    assert logged(config) == ["double 3"]


async def test_a_process_that_cannot_be_started_again_is_named(tmp_path):
    config = write(tmp_path)
    async with started(config) as pool:
        await converse(pool, "a", "x")
        config.path.unlink()
        with pytest.raises(EnvironmentFailed, match=r"turn 2: .*mine\.py does not exist"):
            await converse(pool, "a", "x", "step:os._exit(3)", known=1)


async def test_a_worker_that_was_killed_while_idle_costs_no_retry(tmp_path):
    config = write(tmp_path, retries=0)
    async with started(config) as pool:
        await converse(pool, "a", "x")
        process = await pool._slots[0].ready()
        assert process._group is not None
        psutil.Process(process._group).kill()
        async with asyncio.timeout(10.0):
            while process.ended is None:
                await asyncio.sleep(0.02)
        assert await converse(pool, "a", "x", "y", known=1) == observed("1 x", "2 y")
    assert logged(config) == ["reset a", "step a x"] * 2 + ["step a y"]


async def test_a_start_that_fails_ends_the_other_processes(tmp_path):
    """The first process to import the file hangs. The other finds its mark and fails."""
    body = (
        "import time\nfrom pathlib import Path\n"
        "try: Path(__file__).with_name('first').open('x')\n"
        "except FileExistsError: raise ValueError('no second') from None\n"
        "time.sleep(600)\n"
    )
    pool = EnvironmentPool(write(tmp_path, body, processes=2))
    with pytest.raises(ValueError, match="no second"):
        await asyncio.wait_for(pool.start(), 20.0)


async def test_closing_ends_calls_that_still_run(tmp_path):
    async with started(write(tmp_path, timeout_s=60.0)) as pool:
        call = asyncio.create_task(converse(pool, "a", "step:time.sleep(60)"))
        await asyncio.sleep(0.3)
    with pytest.raises(EnvironmentFailed, match="refrain has closed"):
        await call


async def test_a_call_without_the_earlier_answers_is_refused(tmp_path):
    async with started(write(tmp_path)) as pool:
        with pytest.raises(ValueError, match="2 turns need 1 answers, not 0"):
            await pool.answer("a", task_of("a"), turns_of("x", "y"), [])


@pytest.mark.parametrize(
    "change",
    [
        {"num_calls": -1},
        {"num_calls": True},
        {"score": float("nan")},
        {"messages": [{"role": "assistant", "content": "x"}]},
        {"more": 1},
    ],
)
def test_answers_of_a_process_are_checked_again(change):
    (answer,) = observed("x")
    content = asdict(answer)
    assert parsed_answer(content) == answer
    with pytest.raises(ValueError, match=r"answer|number|role"):
        parsed_answer(content | change)


async def test_instant_answers_are_cheap(tmp_path):
    """An actor must give 500 answers a second. This bound leaves room for a busy machine."""
    async with started(write(tmp_path, timeout_s=30.0)) as pool:
        began_s = time.monotonic()
        await asyncio.gather(*(converse(pool, f"a{i}", *"abcde") for i in range(60)))
        assert 300 / (time.monotonic() - began_s) > 100
