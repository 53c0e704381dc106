"""Hostile scorers that fork, forge replies, flood the socket or return bad values. They must not
harm or fool refrain's process, and the error names the fault."""

import contextlib
import json
import os
import socket
import time
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refrain.engines.reward import channel, results, worker
from refrain.engines.reward.process import ScorerProcess
from refrain.engines.reward.scorer import Response, Scorer
from refrain.engines.user_code import launch
from refrain.engines.user_code.importing import UserFault
from refrain.schemas.reward import FunctionReward
from tests.reward.test_process import wait_until

HEAD = """
import ctypes, gc, json, math, os, socket, sys, threading, time

REFRAIN = int(sys.argv[-1])

def write(data):
    while data:
        data = data[os.write(REFRAIN, data):]

def reply(**changes):
    parent = next(one for one in gc.get_objects() if type(one).__name__ == "Parent")
    line = {"chunk": parent.chunk, "reply": "done", "index": 1, "content": {"score": 9.0}}
    write(json.dumps(line | changes).encode() + b"\\n")
"""
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"


def write(
    directory: Path, body: str, define: str = FUNCTION, timeout_s=20.0, **changes
) -> FunctionReward:
    path = directory / "my_reward.py"
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    path.write_text(f"{HEAD}\n{define}\n{lines}")
    return FunctionReward(path=path, timeout_s=timeout_s, **changes)


def responses(num: int) -> list[Response]:
    return [Response("cafe", index, "mine", str(index), "4", {}) for index in range(num)]


def score(config: FunctionReward, num: int) -> list[tuple[float, dict]]:
    scorer = Scorer(config, 1)
    try:
        return scorer.score(responses(num))
    finally:
        for one in scorer.processes:
            one.close()


def holding(pid: int, target: str) -> list[str]:
    """Return the open files of a process whose names begin with `target`."""
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        # The process may close a file meanwhile.
        with contextlib.suppress(FileNotFoundError):
            links.append(str(link.readlink()))
    return [link for link in links if link.startswith(target)]


@pytest.mark.parametrize(
    ("define", "fork"),
    [
        (FUNCTION, "os.fork()"),
        (f"async {FUNCTION}", "ctypes.CDLL(None).fork()"),
    ],
)
def test_a_function_that_forks_and_returns_twice_scores_each_response_once(tmp_path, fork, define):
    """The child is slow, so its replies arrive while the scorer works on later chunks."""
    body = f"if {fork} == 0:\n    time.sleep(0.05)\nreturn float(solution_str)"
    assert score(write(tmp_path, body, define), 70) == [(float(i), {}) for i in range(70)]


def test_a_child_that_stays_keeps_no_socket_and_no_call_waiting(tmp_path):
    body = "if os.fork() == 0:\n    time.sleep(600)\nreturn float(solution_str)"
    one = ScorerProcess(write(tmp_path, body))
    one.start()
    worker_process = psutil.Process(one._group)
    own = os.readlink(f"/proc/{worker_process.pid}/fd/{worker_process.cmdline()[-1]}")
    assert one.score([dict.fromkeys(worker.ARGUMENTS, "4")]) == [(4.0, {})]
    (child,) = worker_process.children()
    assert len(holding(worker_process.pid, own)) == 1
    wait_until(lambda: not holding(child.pid, own), "the child has closed it")
    started = time.monotonic()
    one.close()
    assert not child.is_running()
    assert time.monotonic() - started < 10.0


FORGED = {
    "another chunk's": "reply(chunk='0' * 32)",
    "no finite score": "reply(content={'score': math.nan})",
    "no reply": "write(b'hello\\n')",
}
FORGED_TOO = {
    "twice": "reply(); reply(); reply()",
    "a response's that is done": "reply(index=0)",
    "one that does not exist": "reply(index=10**6)",
    "one before all": "reply(index=-1, reply='started')",
    "no score": "reply(content={'score': 'x'})",
    "a score without end": "reply(content={'score': 10**400})",
    "no text": "reply(content={'score': 1, 'pred': '\\ud800'})",
    "a reason that is no text": "reply(reply='failed', content='\\ud800')",
    "no UTF-8": "write(b'\\xff\\n')",
    "deep": "write(b'[' * 100_000 + b'\\n')",
    "half a line": "write(b'{'); time.sleep(60)",
    "a drip": "while True: write(b'{'); time.sleep(0.1)",
    "a flood": "while True: write(b'0' * 2**20)",
    "a flood of lines": "while True: write(b'\\n')",
    "a flood of replies": "while True: reply(reply='started')",
    "a flood of scores": "while True: reply()",
}
ACCEPTED = ("twice", "a response's that is done", "a flood of scores")
"""Forgeries that may count as a score of the forger's own response."""


def rare(cases: dict[str, Any]) -> list[Any]:
    """Return the cases as slow parameters, which only `make test` runs."""
    return [
        pytest.param(name, case, id=name, marks=pytest.mark.slow) for name, case in cases.items()
    ]


@pytest.mark.parametrize(("name", "body"), [*FORGED.items(), *rare(FORGED_TOO)])
def test_forged_replies_do_not_affect_other_responses(tmp_path, name, body):
    """The scorer forges replies for the second of three responses. The others keep their scores."""
    body = f"if solution_str == '1':\n    {body}\nreturn 1"
    config = write(tmp_path, body, on_error="zero", timeout_s=3.0)
    before = psutil.Process().memory_info().rss
    scored = score(config, 3)
    assert (scored[0], scored[2]) == ((1.0, {}), (1.0, {}))
    assert "error" in scored[1][1] or name in ACCEPTED
    assert psutil.Process().memory_info().rss - before < 50e6
    json.dumps(scored, allow_nan=False, ensure_ascii=False).encode()


def test_a_pickle_from_a_scorer_runs_nothing(tmp_path):
    """The scorer sends a pickle as multiprocessing does. Loading it would run a command."""
    mark = tmp_path / "mark"
    body = (
        "from multiprocessing.connection import Connection\n"
        f"class Command:\n    __reduce__ = lambda self: (os.system, ('touch {mark}',))\n"
        "Connection(os.dup(REFRAIN)).send(('done', 0, Command()))\n"
        "Connection(os.dup(REFRAIN)).send(Command())\n"
        "time.sleep(60)"
    )
    with pytest.raises(ValueError, match="sample 0 of prompt cafe"):
        score(write(tmp_path, body, timeout_s=1.0), 1)
    assert not mark.exists()


def test_late_output_does_not_reach_other_chunks(tmp_path):
    """A thread of the scorer writes garbage after its call has returned a score."""
    late = "threading.Timer(0.2, write, [b'garbage\\n']).start()"
    one = ScorerProcess(write(tmp_path, f"{late}\nreturn float(solution_str)"))
    call = dict.fromkeys(worker.ARGUMENTS, "4")
    try:
        for _ in range(3):
            assert one.score([call]) == [(4.0, {})]
            time.sleep(0.4)
    finally:
        one.close()


ENDS = {
    "sys.exit(0)": "SystemExit: 0",
    "os.closerange(0, 200); return 1": "ended its process",
    "class E(Exception):\n    def __str__(self): raise E\nraise E": "its message cannot be read",
    "raise ValueError('\\ud800')": r"ValueError: \ud800",
}
ENDS_TOO = {
    "raise SystemExit('done')": "SystemExit: done",
    "raise KeyboardInterrupt": "ended by SIGINT",
    "class Own(BaseException): pass\nraise Own": "ended its process",
    "socket.fromfd(REFRAIN, 1, 1).shutdown(socket.SHUT_RDWR); time.sleep(60)": "SIGKILL",
    "os.execv('/bin/true', ['true'])": "ended its process",
    "os.execv('/bin/sleep', ['sleep', '60'])": "no score within 2 s",
    "os.killpg(os.getpgid(os.getppid()), 9); time.sleep(60)": "SIGKILL",
    "os.kill(os.getppid(), 19); time.sleep(60)": "no score within 2 s",
    "raise ValueError('x' * 10**7)": "ValueError: xxx",
    "sys.stdout.write('x' * 10**6); sys.stderr.write('x'); raise OSError('end')": "OSError: end",
    "os.chdir('/'); raise OSError('end')": "OSError: end",
    "bytearray(10**12)": "MemoryError",
}


@pytest.mark.parametrize(("body", "reason"), [*ENDS.items(), *rare(ENDS_TOO)])
def test_how_a_scorer_ends_is_named(tmp_path, body, reason, monkeypatch):
    monkeypatch.setattr(launch, "END_TIMEOUT_S", 5.0)
    config = write(tmp_path, body, timeout_s=2.0)
    with pytest.raises(ValueError, match=r"no reward for sample 0 of prompt cafe") as caught:
        score(config, 1)
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 20_000
    str(caught.value).encode()


BAD = {
    "{'score': 1, 'pred': '\\ud800'}": "not valid UTF-8 in 'pred'",
    "{'score': 1, 'pred': [{'a': '\\ud800'}]}": "not valid UTF-8 in 'pred'",
    "{'score': 1, '\\ud800': 1}": "not valid UTF-8",
    "{'score': 1, 'x' * 201: 1}": "names of at most 200 characters",
    "{'score': 1} | {str(i): 1 for i in range(101)}": "101 values beside the score",
    "{'score': 1, 'log': 'x' * 10**6}": "shorten them to at most 65536 bytes",
    "{'score': 1, 'deep': eval('[' * 50 + ']' * 50)}": "'deep' (str) is nested over 20 levels deep",
    "{'score': 10**400}": "not a finite number",
    "10**400": "not a finite number",
    "1e30": "not a finite number within 1e+09",
    "math.nan": "not a finite number",
}


def test_unstorable_results_follow_on_error(tmp_path):
    """With `on_error: zero`, a bad result scores 0, the record names the reason, and it does not
    hold the bad value."""
    results = ", ".join(f"lambda: {result}" for result in ["1", *BAD, "1"])
    body = f"return [{results}][int(solution_str)]()"
    first, *bad, last = score(write(tmp_path, body, on_error="zero"), len(BAD) + 2)
    assert (first, last) == ((1.0, {}), (1.0, {}))
    for (reward, extra), reason in zip(bad, BAD.values(), strict=True):
        assert reward == 0.0
        assert reason in extra["error"]
        json.dumps(extra, ensure_ascii=False).encode()


def test_numbers_that_are_not_finite_are_none_in_the_record(tmp_path):
    body = "return {'score': 1, 'a': math.nan, 'b': [math.inf, 2], 'c': 10**400, 'd': True}"
    kept = {"a": None, "b": [None, 2], "c": None, "d": True}
    assert score(write(tmp_path, body), 1) == [(1.0, kept)]


def test_scorer_receives_the_values_of_rows(tmp_path):
    """Values of each type of Parquet and JSON arrive unchanged."""
    given = {
        "plain": [None, True, 1, 2**80, 0.5, "text", "\ud800", "line\nline", {}, []],
        "of Parquet": [b"\xff", Decimal("1.10"), date(2024, 1, 2), clock(3, 4, 5, 6)],
        "times": [datetime(2024, 1, 2, 3, 4, 5, 6), datetime(2024, 1, 2, tzinfo=UTC)],
        "span": timedelta(days=-3, microseconds=7),
        "map": [("key", {"inner": (1, [2])})],
        "nested": {"refrain.type": "bytes", "refrain.value": "00"},
    }
    body = f"import datetime; from decimal import Decimal\nreturn extra_info == {given!r}"
    response = Response("cafe", 0, "mine", "four", given["map"], given)
    scorer = Scorer(write(tmp_path, body), 1)
    try:
        assert scorer.score([response]) == [(1.0, {})]
        with pytest.raises(ValueError, match="cannot receive a set: remove it"):
            scorer.score([Response("cafe", 0, "mine", "four", {1}, {})])
    finally:
        scorer.processes[0].close()


def test_a_pid_that_a_scorer_sends_is_not_killed(tmp_path):
    """The guard reports the process group. A fake reply at import, with another pid, is ignored."""
    config = write(tmp_path, "return 1")
    config.path.write_text(
        "import json, os, sys\n"
        "line = {'chunk': '', 'reply': 'ready', 'index': -1, 'content': 1}\n"
        "os.write(int(sys.argv[-1]), json.dumps(line).encode() + b'\\n')\n"
        + config.path.read_text()
    )
    one = ScorerProcess(config)
    try:
        one.start()
        assert one._process is not None
        assert one._group is not None
        assert psutil.Process(one._group).ppid() == one._process.pid
    finally:
        one.close()


@pytest.mark.parametrize("end", ["os._exit(3)", "write(b'hello\\n')"])
def test_of_calls_that_run_together_the_one_that_ends_them_is_named(tmp_path, end):
    body = f"import asyncio\nif solution_str == '3':\n    {end}\nawait asyncio.sleep(0.1)\nreturn 1"
    config = write(tmp_path, body, f"async {FUNCTION}", on_error="zero")
    assert [reward for reward, _ in score(config, 6)] == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="no reward for sample 3 of prompt cafe"):
        score(config.model_copy(update={"on_error": "stop"}), 6)


TEXTS = st.text("a\u00e9\ud800\n\0")
PARTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


@settings(max_examples=50)
@given(st.dictionaries(TEXTS, PARTS), st.floats() | PARTS)
def test_any_result_is_one_that_the_record_can_hold_or_is_refused(extra, score):
    try:
        kept, parts = results.checked_score(extra | {"score": score})
    except UserFault:
        return
    assert abs(kept) <= results.MAX_SCORE
    record = json.dumps(parts, allow_nan=False)
    duckdb.execute("SELECT json_extract(?::JSON, '$.*')", [record]).fetchall()
    line = {"chunk": "", "reply": "done", "index": 0, "content": {"score": kept} | parts}
    assert channel.ReplyLine.model_validate_json(json.dumps(line)).content == line["content"]
    assert len(record) <= results.MAX_EXTRA_BYTES


@given(st.binary(max_size=200))
def test_any_bytes_are_a_reply_or_are_refused(line):
    own, theirs = socket.socketpair()
    with own, theirs:
        theirs.sendall(line + b"\n")
        with pytest.raises(channel.NoReplyError):
            channel.Channel(own).receive(5.0)


@pytest.mark.parametrize("unread", [b"", b"x"])
def test_a_socket_whose_other_end_is_closed_is_not_silent(unread):
    own, theirs = socket.socketpair()
    with own:
        one = channel.Channel(own)
        assert one.is_silent()
        own.sendall(unread)
        theirs.close()
        assert not one.is_silent()
