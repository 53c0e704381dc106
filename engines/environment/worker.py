"""Script that runs a user's environment in a process of its own. It imports nothing of refrain,
because the user may have modules of the same names.

The file defines functions in a list `tools`, or a class:

    class Guess:
        tools = [multiply]                  # optional
        replays = True                      # whether the same steps lead to the same state
        def reset(self, task): ...          # task.seed .ground_truth .extra_info ...
        def step(self, turn): ...           # turn.text .calls .run(); plain or async
        def end(self, reason): return 0.0   # the conversation was cut
        def close(self): ...

The process talks to refrain over one socket, with one JSON message per line. First it receives what
to load, and replies READY or FAILED. Then requests come at any time, each with a random name that
its reply repeats. Plain methods run in threads, coroutines on the event loop. refrain enforces the
time limits, kills a process that hangs, and checks all replies.
"""

import asyncio
import hashlib
import importlib.util
import inspect
import json
import os
import resource
import socket
import sys
import sysconfig
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

READY, DONE, FAILED = "ready", "done", "failed"


def part(name):
    """Load another part of this script, which is no module of the user's import path."""
    file = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"_refrain_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks, tools = part("worker_checks"), part("worker_tools")
Refused = checks.Refused


class Parent:
    """Socket to refrain. Only the process that opened the socket may use it: a child of the user's
    code that returns from it exits when it replies."""

    def __init__(self, descriptor):
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._received = bytearray()
        os.register_at_fork(after_in_child=self._socket.close)

    def receive(self):
        """Return the next message. Raise EOFError when refrain has closed its end."""
        while b"\n" not in self._received:
            received = self._socket.recv(2**20)
            if not received:
                raise EOFError
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def reply(self, request, reply, content=None):
        if os.getpid() != self._pid:
            os._exit(0)
        line = json.dumps({"request": request, "reply": reply, "content": content}).encode() + b"\n"
        with self._lock:
            self._socket.sendall(line)


class Environment:
    """A user's file: tools, and a class if there is one."""

    def __init__(self, path, name):
        module = import_file(Path(path))
        self._class = find_class(module, path, name)
        declared = getattr(self._class if self._class else module, "tools", None) or []
        self.tools = {tool.__name__: tool for tool in declared}
        if self._class is None and not declared:
            raise Refused(f"{path} has neither a class with `step` nor a list `tools`")

    def setup(self):
        """Return the fields of `schemas.environment.EnvironmentSetup`."""
        return {
            "tools": [tools.schema_of(tool) for tool in self.tools.values()],
            "has_class": self._class is not None,
            "replays": bool(getattr(self._class, "replays", True)),
        }

    def make(self):
        """Return a new object of the class, or None for tools alone."""
        return self._class() if self._class else None


def find_class(module, path, name):
    """Return the class of an environment, or None for tools alone."""
    if name is not None:
        found = getattr(module, name, None)
        if name == "tools" and found:
            return None
        if not inspect.isclass(found) or not callable(getattr(found, "step", None)):
            raise Refused(
                f"{path} has no class {name!r} with a method `step`: set environment.name"
            )
        return found
    own = [
        one for one in vars(module).values()
        if inspect.isclass(one) and one.__module__ == module.__name__ and hasattr(one, "step")
    ]  # fmt: skip
    if len(own) > 1:
        names = ", ".join(one.__name__ for one in own)
        raise Refused(f"{path} has several classes with `step` ({names}): set environment.name")
    return own[0] if own else None


def import_file(path):
    if not path.is_file():
        raise Refused(f"environment.path: there is no file {path}")
    name = hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()
    private = f"_refrain_environment_{name}"
    spec = importlib.util.spec_from_file_location(private, path)
    if spec is None or spec.loader is None:
        raise Refused(f"environment.path {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    # Leave no `__pycache__` beside the user's file.
    sys.dont_write_bytecode = True
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Refused(f"{path} cannot be imported: {checks.message_of(error)}") from error
    return module


class Server:
    """Conversations of this process."""

    def __init__(self, parent, environment, at_once):
        self._parent = parent
        self._environment = environment
        self._threads = ThreadPoolExecutor(at_once)
        self._conversations = {}
        self._tasks = set()

    def receive_all(self, loop):
        """Receive requests in a thread of its own, until refrain closes its end."""
        with suppress(EOFError, OSError):
            while True:
                message = self._parent.receive()
                loop.call_soon_threadsafe(self._begin, message)
        # Threads of the user's code may never end.
        os._exit(0)

    def _begin(self, message):
        task = asyncio.ensure_future(self._serve(message))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, message):
        method = getattr(self, "_" + message["method"])
        try:
            content = await method(message["conversation"], **message["content"])
            self._parent.reply(message["request"], DONE, content)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            self._parent.reply(message["request"], FAILED, checks.explain(error))

    async def _reset(self, conversation, task):
        own = await self._call(self._environment.make)
        if hasattr(own, "reset"):
            await self._call(own.reset, SimpleNamespace(**task))
        self._conversations[conversation] = own

    async def _step(self, conversation, text, calls, problem, number):
        own = self._conversations[conversation]
        turn = tools.PolicyTurn(text, calls, problem, number, self._environment.tools)
        if own is not None:
            answer = checks.checked_answer(await self._call(own.step, turn))
        elif turn.calls or turn.problem:
            answer = checks.checked_answer(await self._call(turn.run))
        else:
            answer = {"messages": [], "score": None}
        counts = {"num_calls": turn.num_calls, "num_failed_calls": turn.num_failed_calls}
        return {**answer, **counts}

    async def _end(self, conversation, reason):
        own = self._conversations[conversation]
        if not hasattr(own, "end"):
            return None
        return checks.checked_score(await self._call(own.end, reason))

    async def _close(self, conversation):
        own = self._conversations.pop(conversation, None)
        if hasattr(own, "close"):
            await self._call(own.close)

    async def _call(self, function, *arguments):
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._threads, caught, function, *arguments)
        return await result if inspect.isawaitable(result) else result


def caught(function, *arguments):
    """Call a function. An event loop would let StopIteration and SystemExit end it."""
    try:
        return function(*arguments)
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(checks.message_of(error)) from error


def ordered_path(directory, entries):
    """Return the import path: standard library, directory of the user's file, other entries. So the
    user's files hide no standard module."""
    library = sysconfig.get_path("stdlib")
    ranks = {library: 0, f"{library}/lib-dynload": 0, str(directory): 1}
    distinct = dict.fromkeys([str(directory), *filter(None, entries)])
    return sorted(distinct, key=lambda entry: ranks.get(entry, 2))


def serve(parent):
    """Load the user's file, then serve conversations."""
    with suppress(OSError):
        # If memory runs out, Linux should kill an environment rather than the run.
        Path("/proc/self/oom_score_adj").write_text("1000")
    given = parent.receive()
    try:
        directory = Path(given["path"]).absolute().parent
        sys.path[:] = ordered_path(directory, [*sys.path, *given["search_path"]])
        if given["max_memory_bytes"]:
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            most = given["max_memory_bytes"]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        environment = Environment(given["path"], given["name"])
        setup = environment.setup()
    except (Exception, SystemExit) as error:
        parent.reply("", FAILED, checks.explain(error))
        return
    parent.reply("", READY, setup)

    async def run():
        server = Server(parent, environment, given["at_once"])
        loop = asyncio.get_running_loop()
        threading.Thread(target=server.receive_all, args=(loop,), daemon=True).start()
        await asyncio.Event().wait()

    asyncio.run(run())


if __name__ == "__main__":
    serve(Parent(int(sys.argv[1])))
