"""The process of a user's scorer: its environment, its limits, and that no process is left over."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from refrain.engines.reward.process import CallError, ScorerProcess
from refrain.engines.reward.scorer import check_reward
from refrain.schemas.reward import FunctionReward
from tests.conftest import REPOSITORY

WAIT_S = 20.0
CALL = {"data_source": "mine", "solution_str": "4", "ground_truth": "4", "extra_info": {}}
STARTS_OTHERS = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(600)", {mark!r}]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        subprocess.Popen(sleeper)
        os.execv(sys.executable, sleeper)
    {then}
"""


def write(directory: Path, body: str, **changes) -> FunctionReward:
    path = directory / "my_reward.py"
    path.write_text(body)
    return FunctionReward(path=path, **{"timeout_s": 20.0} | changes)


def scores(config: FunctionReward) -> Any:
    """Return the value that the function reports for one call."""
    process = ScorerProcess(config)
    try:
        return process.score([CALL])[0][1]["is"]
    finally:
        process.close()


def function(expression: str, head: str = "") -> str:
    arguments = "data_source, solution_str, ground_truth, extra_info=None"
    return (
        f"{head}\ndef compute_score({arguments}):\n    return {{'score': 1, 'is': {expression}}}\n"
    )


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if mark in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture
def mark(tmp_path):
    """Yield a mark for the command line of each process that the function starts. Kill these
    processes at the end."""
    mark = f"mark-{tmp_path}"
    yield mark
    for process in marked(mark):
        process.kill()


def starter(directory: Path, mark: str, then: str, **changes) -> FunctionReward:
    return write(directory, STARTS_OTHERS.format(mark=mark, then=then), **changes)


@pytest.mark.parametrize("then", ["time.sleep(600)", "os._exit(3)", "1 / 0"])
def test_a_call_that_fails_leaves_nothing_running(tmp_path, mark, then):
    process = ScorerProcess(starter(tmp_path, mark, then, timeout_s=2.0))
    with pytest.raises(CallError):
        process.score([CALL])
    assert marked(mark) == []


def test_closed_process_leaves_nothing_running(tmp_path, mark):
    process = ScorerProcess(starter(tmp_path, mark, "return 1"))
    assert process.score([CALL]) == [(1.0, {})]
    wait_until(lambda: len(marked(mark)) == 4, "all four run")
    process.close()
    assert marked(mark) == []


@pytest.mark.parametrize("then", ["time.sleep(600)", "return 1"])
def test_nothing_outlives_a_parent_that_was_killed(tmp_path, mark, then):
    """This holds while the function hangs, and while it is idle."""
    starter(tmp_path, mark, then)
    code = (
        "import sys, time; from pathlib import Path;"
        "from refrain.engines.reward.process import ScorerProcess; from refrain.schemas.reward import *;"
        f"process = ScorerProcess(FunctionReward(path=Path(sys.argv[1])));"
        f"process.score([{CALL}]); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, tmp_path / "my_reward.py"]
    parent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    wait_until(lambda: len(marked(mark)) == 4, "all four run")
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 6, "expected the guard, the scorer and the four sleepers"
    parent.kill()
    parent.wait(WAIT_S)
    _, alive = psutil.wait_procs(children, timeout=WAIT_S)
    assert alive == []
    assert marked(mark) == []


def test_nothing_outlives_a_guard_that_was_killed(tmp_path, mark):
    body = "subprocess.Popen(sleeper); time.sleep(600)"
    process = ScorerProcess(
        write(
            tmp_path,
            "import subprocess, sys, time\n"
            f"sleeper = [sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}]\n"
            "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
            f"    {body}\n",
        )
    )
    process.start()
    assert process._process is not None
    guard = process._process
    killer = threading.Thread(
        target=lambda: (wait_until(lambda: marked(mark), "it runs"), guard.kill())
    )
    killer.start()
    with pytest.raises(CallError, match="ended by SIGKILL"):
        process.score([CALL])
    killer.join(WAIT_S)
    wait_until(lambda: not marked(mark), "nothing runs")


def worker_of(process: ScorerProcess) -> psutil.Process:
    assert process._group is not None
    return psutil.Process(process._group)


def test_a_scorer_that_was_killed_while_idle_is_started_again(tmp_path):
    process = ScorerProcess(write(tmp_path, function("1")))
    try:
        assert process.score([CALL]) == [(1.0, {"is": 1})]
        assert process._process is not None
        worker_of(process).kill()
        process._process.wait(WAIT_S)
        assert process.score([CALL]) == [(1.0, {"is": 1})]
    finally:
        process.close()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (signal.SIGKILL, "ended by SIGKILL, as Linux does when memory is short"),
        (signal.SIGSTOP, r"stood still for 1 s \(reward.timeout_s\)"),
    ],
)
def test_a_scorer_that_takes_nothing_is_named(tmp_path, sent, message):
    """The call is too large for the socket's buffer, so sending it waits for the scorer."""
    process = ScorerProcess(write(tmp_path, function("1"), timeout_s=1.0))
    process.start()
    worker = worker_of(process)
    worker.suspend()
    threading.Timer(0.3, worker.send_signal, [sent]).start()
    with pytest.raises(CallError, match=message):
        process.score([CALL | {"solution_str": "4" * 10_000_000}])
    assert not worker.is_running()


def test_a_scorer_sees_the_variables_that_are_named_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "1")
    monkeypatch.setenv("JUDGE_KEY", "2")
    monkeypatch.setenv("REFRAIN_RUN_DIR", "/runs/mine")
    body = function("sorted(os.environ)", "import os")
    plain = scores(write(tmp_path, body))
    assert {"PATH", "REFRAIN_RUN_DIR"} <= set(plain)
    assert not {"SECRET_KEY", "JUDGE_KEY"} & set(plain)
    named = scores(write(tmp_path, body, environment=["JUDGE_KEY"]))
    assert set(named) == {*plain, "JUDGE_KEY"}
    with pytest.raises(ValueError, match=r"reward.environment names NO_SUCH_KEY, which is not set"):
        check_reward(write(tmp_path, body, environment=["NO_SUCH_KEY"]), set())


def test_a_users_modules_are_the_users(tmp_path, monkeypatch):
    """A module beside the user's file wins over a refrain package of the same name. It does not
    replace a module of the standard library."""
    for name in ("schemas", "tasks", "engines", "token", "json"):
        (tmp_path / f"{name}.py").write_text("WHOSE = 'mine'\n")
    monkeypatch.chdir(tmp_path)
    names = "schemas, tasks, engines, token, json"
    body = function(f"[getattr(m, 'WHOSE', 0) for m in ({names})]", f"import {names}")
    assert scores(write(tmp_path, body)) == ["mine", "mine", "mine", 0, 0]


def test_modules_of_the_parents_path_are_found_and_refrain_comes_last(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "flows").mkdir(parents=True)
    (elsewhere / "flows" / "__init__.py").write_text("WHOSE = 'mine'\n")
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.setattr(sys, "path", [*sys.path, str(elsewhere)])
    body = function("[flows.WHOSE, schemas.__name__]", "import flows, schemas.reward")
    assert scores(write(tmp_path, body)) == ["mine", "schemas"]


def test_a_limit_that_is_reached_is_named(tmp_path):
    config = write(
        tmp_path, function("len(bytearray(2_000_000_000))"), max_memory_bytes=1_000_000_000
    )
    with pytest.raises(CallError, match=r"reward\.max_memory_bytes is 1000000000"):
        scores(config)


def test_linux_ends_a_scorer_first_where_memory_is_short(tmp_path):
    assert scores(write(tmp_path, function("open('/proc/self/oom_score_adj').read()"))) == "1000\n"


def test_limits_hold_for_what_the_function_starts(tmp_path):
    code = "import resource as r; print(r.getrlimit(r.RLIMIT_DATA))"
    head = "import subprocess, sys"
    body = function(f"subprocess.check_output([sys.executable, '-c', {code!r}], text=True)", head)
    config = write(tmp_path, body, max_memory_bytes=2_000_000_000)
    assert scores(config).split("\n")[0] == "(2000000000, 2000000000)"


@pytest.mark.parametrize("named", [False, True])
def test_a_scorer_sees_the_locale_and_the_date_of_the_run(tmp_path, monkeypatch, named) -> None:
    """It sees one of the machine's own only if the config names it."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LC_TIME", "de_DE.UTF-8")
    names = "('TZ', 'LANG', 'LC_TIME', 'REFRAIN_DATE', 'PATH')"
    body = function(f"[os.environ.get(n) for n in {names}]", "import os")
    config = write(tmp_path, body, environment=["LC_TIME"] * named)
    told = {"TZ": "Europe/Berlin", "LANG": "C.UTF-8", "REFRAIN_DATE": "2026-11-26T09:30:00"}
    process = ScorerProcess(config, told)
    try:
        found = process.score([CALL])[0][1]["is"]
    finally:
        process.close()
    own = "de_DE.UTF-8" if named else None
    assert found == ["Europe/Berlin", "C.UTF-8", own, told["REFRAIN_DATE"], os.environ["PATH"]]
