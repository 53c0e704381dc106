"""refrain's end of the socket to a scorer's process, with one JSON message per line.

The process may write anything. So lines have a size limit, waits have a time limit, and invalid
replies raise NoReplyError.
"""

import json
import socket
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from refrain.engines.reward.worker import Reply

MAX_LINE_BYTES = 2**18
"""Size limit of a line, which holds a response's extra values or a message with traceback."""


class ReplyLine(BaseModel):
    """One reply of a scorer's process."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    chunk: str
    """Name of the call's chunk."""
    reply: Reply
    index: int
    """Position of the call in its chunk."""
    content: JsonValue
    """`DONE`: the score and extra values. `FAILED`: the reason."""


class NoReplyError(ValueError):
    """The process wrote something that is not a valid reply."""


class Channel:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def close(self) -> None:
        """Close the socket. The guard notices this and ends the process."""
        self._socket.close()

    def is_silent(self) -> bool:
        """Whether the process is alive and nothing unread has arrived."""
        self._socket.settimeout(0.0)
        try:
            self._socket.recv(1)
        except OSError as error:
            return isinstance(error, BlockingIOError) and not self._received
        return False

    def send(self, message: Any, timeout_s: float) -> None:
        """Send a message. Raises TimeoutError if the process does not read all of it in time, and
        OSError if the process has ended."""
        self._socket.settimeout(timeout_s)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> ReplyLine:
        """Return the next reply.

        Raises TimeoutError, NoReplyError, or EOFError or OSError if the process has ended.
        """
        line = self.receive_line(timeout_s)
        try:
            return ReplyLine.model_validate_json(line)
        except ValidationError as error:
            raise NoReplyError(f"{bytes(line[:80])!r}") from error

    def receive_line(self, timeout_s: float) -> bytearray:
        """Return the next line. Raises as `receive` does."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            if len(self._received) > MAX_LINE_BYTES:
                raise NoReplyError(f"over {MAX_LINE_BYTES} bytes without an end of line")
            # Even at the deadline, read the bytes that have already arrived.
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
