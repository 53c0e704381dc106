"""The error that killed an engine is found in the output of its processes."""

import multiprocessing
import os
import sys
import traceback

import pytest

from refrain.engines.inference.engine.last_error import find_error, last_error, tells_cause

CORE = """\
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:00<00:00, 23.18it/s]
(EngineCore pid=812) ERROR 11-22 20:50:48 [core.py:1512] EngineCore encountered a fatal error.
(EngineCore pid=812) ERROR 11-22 20:50:48 [core.py:1512] Traceback (most recent call last):
(EngineCore pid=812) ERROR 11-22 20:50:48 [core.py:1512]   File "core.py", line 1496, in run
(EngineCore pid=812) ERROR 11-22 20:50:48 [core.py:1512]     engine_core.run_busy_loop()
(EngineCore pid=812) ERROR 11-22 20:50:48 [core.py:1512] NotImplementedError: head_dim 48
(EngineCore pid=812) Process EngineCore:
(EngineCore pid=812) Traceback (most recent call last):
(EngineCore pid=812)   File "core.py", line 1496, in run
(EngineCore pid=812) NotImplementedError: head_dim 48
ERROR 11-22 20:50:49 [async_llm.py:901] AsyncLLM output_handler failed.
ERROR 11-22 20:50:49 [async_llm.py:901] Traceback (most recent call last):
ERROR 11-22 20:50:49 [async_llm.py:901]   File "async_llm.py", line 840, in output_handler
ERROR 11-22 20:50:49 [async_llm.py:901] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
Exception ignored in: <function AsyncLLM.__del__ at 0x7fef5acaf380>
Traceback (most recent call last):
  File "async_llm.py", line 294, in __del__
TypeError: 'NoneType' object is not callable
"""
TWO_WORKERS = """\
(Worker_TP0 pid=1) ERROR 11-22 20:50:48 [w.py:1] Traceback (most recent call last):
(Worker_TP1 pid=2) ERROR 11-22 20:50:48 [w.py:1] Traceback (most recent call last):
(Worker_TP1 pid=2) ERROR 11-22 20:50:48 [w.py:1]   File "w.py", line 3, in forward
(Worker_TP0 pid=1) ERROR 11-22 20:50:48 [w.py:1]   File "w.py", line 3, in forward
(Worker_TP0 pid=1) ERROR 11-22 20:50:48 [w.py:1] torch.OutOfMemoryError: CUDA out of memory
(EngineCore pid=3) ERROR 11-22 20:50:49 [core.py:1] Traceback (most recent call last):
(EngineCore pid=3) ERROR 11-22 20:50:49 [core.py:1]   File "core.py", line 3, in step
(EngineCore pid=3) ERROR 11-22 20:50:49 [core.py:1] RuntimeError: Worker failed with error 'CUDA \
out of memory', please check the stack trace above for the root cause
"""
KILLED = """\
(EngineCore pid=3) ERROR 11-22 20:50:49 [core.py:1] Traceback (most recent call last):
(EngineCore pid=3) ERROR 11-22 20:50:49 [core.py:1]   File "core.py", line 1702, in step
(EngineCore pid=3) ERROR 11-22 20:50:49 [core.py:1] RuntimeError: Executor failed.
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (CORE, "NotImplementedError: head_dim 48"),
        (TWO_WORKERS, "torch.OutOfMemoryError: CUDA out of memory"),
        (KILLED, ""),
        ("no traceback\n\n  at all", ""),
        ("", ""),
    ],
)
def test_error_is_the_last_one_with_a_cause(text, error):
    assert find_error(text) == error


def test_vllm_errors_have_no_cause():
    assert not tells_cause("EngineCore encountered an issue. See stack trace (above) for the ...")
    assert not tells_cause("Engine core initialization failed. See root cause above.")
    assert tells_cause("ValueError: head_dim 48")


def fail_into(file: str) -> str:
    """Return `last_error()` of a process that writes its standard error to this file.

    Ray sends the standard error of actors to a file too.
    """
    with open(file, "wb") as out:
        os.dup2(out.fileno(), 2)
    try:
        raise ValueError("head_dim 48")
    except ValueError:
        traceback.print_exc(file=sys.stderr)
        sys.stderr.flush()
    return last_error()


def test_error_is_read_from_standard_error(tmp_path):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(fail_into, [str(tmp_path / "worker.err")]) == "ValueError: head_dim 48"
