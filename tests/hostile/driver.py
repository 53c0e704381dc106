"""Run many commands in one process, because importing takes seconds.

A request is a line of JSON on standard input, an answer a line on standard output. Functions that
would start engines or services raise `Started` instead.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

HEAVY = (
    *("torch", "transformers", "matplotlib.pyplot", "prefect.client.orchestration", "mlflow"),
    *(
        "prefect",
        "datasets",
        "refrain.tasks.run.preflight",
        "refrain.tasks.profile_inputs",
        "refrain.flows.simulate",
    ),
    *(
        "refrain.flows.export",
        "refrain.flows.report",
        "refrain.flows.sql",
        "refrain.flows.doctor",
        "refrain.flows.evaluation_config",
    ),
    *("refrain.tasks.run.machine", "refrain.engines.learn.head", "refrain.engines.learn.export"),
    "refrain.benchmarks.papers.settings",
)
"""Packages to import first: their import takes longer than a command."""
FAULT = "HOSTILE_FAULT"
READS = ("o", "r")
"""Faults that the process that reads the store inherits."""
NO_FAULT = ("", "-", 0)
LIMIT_S = 10
MEMORY_BYTES = 24 * 2**30


class Started(BaseException):
    """The command accepted its input, and would now start engines or services."""


class Hung(BaseException):
    """A command took longer than `LIMIT_S`."""


def start(*_: Any, **__: Any) -> Any:
    raise Started


def hung(*_: Any) -> None:
    raise Hung


def fault_setter() -> Callable[..., None]:
    try:
        fault_set = ctypes.CDLL(None).fault_set
    except AttributeError:
        return lambda *_: None
    return lambda path, what, number: fault_set(os.fsencode(path), ctypes.c_char(ord(what)), number)


def replace_what_starts(*names: str) -> None:
    import refrain.flows.drafter
    import refrain.flows.launch
    import refrain.flows.samples_server
    import refrain.flows.ui

    refrain.flows.launch._carry_out = start
    refrain.flows.drafter.make_head = start
    refrain.flows.ui.servers = start
    refrain.flows.samples_server.serve_samples = start
    refrain.flows.ui._check_mlflow_app = lambda: None
    for name in names:
        importlib.import_module(f"refrain.benchmarks.{name}").measure = start


def remember_answers() -> None:
    """Cache answers of a store that has not changed, because each query starts a process."""
    import refrain.flows.report
    import refrain.flows.sql
    import refrain.tasks.run.store_query

    environment_of = refrain.tasks.run.store_query._environment
    query_run, answers = refrain.flows.sql.query_run, {}

    def environment() -> dict[str, str]:
        inherited = {name: os.environ[name] for name in (FAULT, "LD_PRELOAD") if name in os.environ}
        return environment_of() | inherited

    def ask(run_dir: Path, query: str, timeout_s: float) -> Any:
        status = (run_dir / "refrain.duckdb").stat()
        key = (run_dir, query, status.st_mtime_ns, status.st_ino)
        if FAULT in os.environ or key not in answers:
            answers[key] = query_run(run_dir, query, timeout_s)
        return answers[key]

    refrain.tasks.run.store_query._environment = environment
    refrain.flows.sql.query_run = refrain.flows.report.query_run = ask


def keep_template_process() -> None:
    """Let the commands share one process, because its start takes a second."""
    from refrain.engines.data.template import templates

    templates.close = lambda: None


def forget() -> None:
    """Clear the caches of what was read."""
    preflight = sys.modules.get("refrain.tasks.run.preflight")
    if preflight:
        preflight._read_inputs.cache_clear()


def run(request: dict[str, Any]) -> dict[str, Any]:
    from refrain.flows.cli import main

    environment, directory = dict(os.environ), os.getcwd()
    os.environ.update(request.get("environment", {}))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    forget()
    started = time.monotonic()
    signal.signal(signal.SIGALRM, hung)
    if fault := request.get("fault"):
        path, what, number = fault
        if what in READS:
            os.environ[FAULT] = f"{what} {number} {path}"
    set_fault(*fault or NO_FAULT)
    signal.alarm(LIMIT_S)
    found: dict[str, Any] = {"started": False, "hung": False, "trace": None}
    try:
        result = CliRunner().invoke(main, request["args"], prog_name="refrain")
        found |= {"code": result.exit_code, "output": result.output}
        if result.exception and not isinstance(result.exception, SystemExit):
            found["trace"] = "".join(traceback.format_exception(result.exception))
    except Started:
        found |= {"code": 0, "output": "", "started": True}
    except Hung:
        found |= {"code": None, "output": traceback.format_exc(), "hung": True}
    finally:
        signal.alarm(0)
        set_fault(*NO_FAULT)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
    return found | {"seconds": time.monotonic() - started}


def main_loop() -> None:
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replace_what_starts()
    remember_answers()
    keep_template_process()
    for name in HEAVY:
        importlib.import_module(name)

    print(json.dumps("ready"), file=answers, flush=True)
    for line in requests:
        print(json.dumps(run(json.loads(line))), file=answers, flush=True)


set_fault = fault_setter()

if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main_loop()
