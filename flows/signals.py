"""How a command ends after SIGHUP, SIGINT or SIGTERM. It treats all three the same.

    first signal     the command unwinds: it stops its processes and says how to resume
    second signal    a run's process exits at once; its cleaner does the rest
    after 30 s       a run that still unwinds exits too

A run's flow has its own thread. Python handles signals in the main thread, and that thread must not
be waiting in Ray or in Prefect when a signal comes.
"""

import atexit
import contextvars
import os
import select
import signal
import stat
import sys
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO, TypeVar

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
GRACE_S = 30.0
"""Seconds that a run may take to unwind. Prefect kills a cancelled run after the same time."""
CHECK_S = 1.0
"""Seconds until a signal that did not interrupt the main thread is handled."""
INTERRUPTED = 130
"""Exit code of a command that a signal ended."""
UNREAD = 128 + signal.SIGPIPE
"""Exit code of a command whose output nobody reads any more: the same as after SIGPIPE."""
_UNWINDING = threading.Event()
"""Set once a run unwinds. From then until Python has exited, another signal ends it at once."""
T = TypeVar("T")
Handler = Callable[[int, FrameType | None], None]


@contextmanager
def ended_by_signals() -> Generator[None]:
    """Raise KeyboardInterrupt in the block at each of the `SIGNALS`. Signals that the process
    ignores stay ignored, for example SIGHUP under `nohup`."""
    with _handling(_interrupt):
        yield


def run_interruptibly(flow: Coroutine[Any, Any, T]) -> T:
    """Return the result of the coroutine. The first signal cancels it; then raise
    KeyboardInterrupt."""
    atexit.register(_say_no_more)
    running = _Running(flow)
    with _handling(running.end):
        return running.result()


class _Running:
    """A coroutine that runs in its own thread."""

    def __init__(self, flow: Coroutine[Any, Any, Any]) -> None:
        self._flow = flow
        self._outcome: Future[Any] = Future()
        self._cancel: Callable[[], object] | None = None
        # The context carries Prefect's tags and settings.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), daemon=True)
        self._thread.name = "the flow"

    def end(self, number: int, frame: FrameType | None) -> None:
        del frame
        if _UNWINDING.is_set():
            os._exit(INTERRUPTED)
        _UNWINDING.set()
        # Let the kernel handle further signals: Python calls no handler while it waits in C.
        _handle(signal.SIG_DFL)
        leave_dead_terminal()
        print(f"ending ({signal.Signals(number).name}); a second signal ends at once", flush=True)
        # The timer covers Python's exit too, because Prefect sends its last logs then.
        late = threading.Timer(GRACE_S, os._exit, (INTERRUPTED,))
        late.daemon = True
        late.start()
        if self._cancel:
            # The loop may just have ended with its flow.
            with suppress(RuntimeError):
                self._cancel()

    def result(self) -> Any:
        self._thread.start()
        # A signal interrupts a wait that has begun, not one that is about to begin.
        while not wait([self._outcome], timeout=CHECK_S).done:
            pass
        import asyncio  # Most commands need no event loop.

        try:
            return self._outcome.result()
        except (asyncio.CancelledError, Exception) as error:
            if not _UNWINDING.is_set():
                raise
            # Errors are expected here: a signal to the process group also ends the run's helpers.
            if isinstance(error, Exception):
                print(f"error while ending: {error}", flush=True)
            raise KeyboardInterrupt from None

    def _run(self) -> None:
        import asyncio

        # Processes started here inherit this mask. A closed terminal sends SIGHUP to its whole
        # process group, and a run cannot unwind when Ray's processes are dead.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            self._outcome.set_result(asyncio.run(self._cancellable()))
        except BaseException as error:
            self._outcome.set_exception(error)

    async def _cancellable(self) -> Any:
        import asyncio

        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        if _UNWINDING.is_set():
            self._flow.close()
            raise asyncio.CancelledError
        return await self._flow


@contextmanager
def _handling(handler: Handler) -> Generator[None]:
    """Install `handler` for the signals that are not ignored, and restore the old ones after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    _handle(handler)
    try:
        yield
    finally:
        for number, old in () if _UNWINDING.is_set() else before.items():
            signal.signal(number, old or signal.SIG_DFL)


def _handle(handler: Handler | signal.Handlers) -> None:
    """Set the handler of all signals that are not ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    leave_dead_terminal()
    raise KeyboardInterrupt


def leave_dead_terminal() -> None:
    """Redirect standard streams to /dev/null when their terminal has been closed."""
    for descriptor in (0, 1, 2):
        try:
            is_device = stat.S_ISCHR(os.fstat(descriptor).st_mode)
        except OSError:  # The descriptor is closed.
            continue
        if is_device and not os.isatty(descriptor):
            _discard(descriptor)


def _discard(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def nobody_reads() -> bool:
    """Return whether standard output is a pipe without a reader, as in `refrain show | head`."""
    look = select.poll()
    look.register(1, 0)
    return any(event & select.POLLERR for _, event in look.poll(0))


def _say_no_more() -> None:
    """Discard what C libraries print after Python has ended. Prefect's threads keep modules alive
    until then, and DuckDB's bindings would report all of their functions as leaked."""
    flush_output()
    _discard(2)


def flush_output() -> None:
    """Flush Python's output. Ignore a reader that has gone, as in `refrain show | true`."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream.fileno())


class WhileRead:
    """A stream that drops output once its terminal or the pipe's reader has gone. The run goes
    on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            _discard(self._stream.fileno())
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _discard(self._stream.fileno())
