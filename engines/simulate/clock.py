"""Virtual time for asyncio: waiting takes no real time, and times are reproducible.

The loop's `time()` stands still while callbacks run. When no callback is ready, the clock jumps to
the next timer. For example, a coroutine that sleeps for an hour returns at once and reads a time an
hour later.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jump(selectors.DefaultSelector):
    """A selector that adds the wait to a virtual clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError(
                "virtual time has stopped: every task waits for another one, but none for a timer"
            )
        self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and only timers advance."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run_virtual(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in virtual time, starting at 0 s, and return its result.

    Do not call it inside a running event loop. Raise RuntimeError when all tasks wait for each
    other. Threads and sockets have no virtual time: while a coroutine waits for one, the clock
    jumps on.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
