"""refrain's end of the socket to a scorer's process: JSON, a line a message.

The process may write anything. So a line has a largest size, every wait has an end, and a reply
that is not as it should be is refused.
"""

import json
import socket
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from engines.reward.worker import Reply

MAX_LINE_BYTES = 2**18
"""Longest line: the extra values of a response, or a message with its traceback."""


class ReplyLine(BaseModel):
    """One reply of a scorer's process."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    chunk: str
    """Name of the chunk that the call is of."""
    reply: Reply
    index: int
    """Place of the call in its chunk."""
    content: JsonValue
    """`DONE`: the score and extra values. `FAILED`: the reason."""


class NoReplyError(ValueError):
    """The process wrote something else."""


class Channel:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def close(self) -> None:
        """The guard sees it, and ends the process."""
        self._socket.close()

    def is_silent(self) -> bool:
        """Whether the process lives and nothing has come that was not read."""
        self._socket.settimeout(0.0)
        try:
            self._socket.recv(1)
        except OSError as error:
            return isinstance(error, BlockingIOError) and not self._received
        return False

    def send(self, message: Any, timeout_s: float) -> None:
        """Raises TimeoutError where the process does not take all of it in time, and OSError where
        it has ended."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> ReplyLine:
        """The next reply.

        Raises TimeoutError, NoReplyError, and EOFError or OSError where the process has ended.
        """
        line = self.receive_line(timeout_s)
        try:
            return ReplyLine.model_validate_json(line)
        except ValidationError as error:
            raise NoReplyError(f"{bytes(line[:80])!r}") from error

    def receive_line(self, timeout_s: float) -> bytearray:
        """The next line; raises as `receive` does."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if len(self._received) > MAX_LINE_BYTES:
                raise NoReplyError(f"over {MAX_LINE_BYTES} bytes without an end of line")
            # At the deadline too, what has come by then is taken.
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                received = self._socket.recv(2**16)
            except BlockingIOError as error:
                raise TimeoutError from error
            if not received:
                raise EOFError
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        return line
