"""Virtual time for asyncio: waiting costs nothing, and the same program gives the same times.

The loop's `time()` stands still while callbacks run. When none is ready it jumps to the next
timer, so a coroutine that "sleeps" for an hour returns at once and finds the clock an hour later.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Jump(selectors.DefaultSelector):
    """Polls instead of waiting, and adds the wait to a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise RuntimeError(
                "virtual time has stopped: every task waits for another one, and none for a timer"
            )
        self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and moves by timers alone."""

    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def run_virtual(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in virtual time, from 0 s on. Not from inside a running event loop.

    Raises RuntimeError when the tasks wait for each other. Threads and sockets are outside virtual
    time: a coroutine that waits for them sees the clock run away.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
