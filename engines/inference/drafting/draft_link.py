"""The wire between verifiers and drafters: MessagePack over ZeroMQ.

A drafter binds a ROUTER and every rollout engine connects a DEALER to it. A message has what one
step of its sender says of all requests: their new tokens, hence no more for a longer text. Messages
keep their order, and none is waited for. None is sent while its drafter is gone or far behind:
drafts are optional, and what was not told is opened anew. One that cannot be read is passed over:
it ends neither the step of an engine nor a drafter that other engines have too.
"""

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from engines.specactor.streams import Drafted, Opened, Verified


@dataclass(frozen=True, slots=True)
class Feedback:
    """Message of one step of a verifier to a drafter, to be read in this order."""

    fresh: bool = False
    """The first message of this verifier: what was open of it before is closed."""
    closed: list[str] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)


_log = logging.getLogger(__name__)
_FEEDBACK = msgspec.msgpack.Decoder(Feedback)
_DRAFTED = msgspec.msgpack.Decoder(list[Drafted])
encode = msgspec.msgpack.encode


def decode_feedback(message: bytes) -> Feedback | None:
    """None for what is none."""
    return _decoded(_FEEDBACK, message)


def _decoded(decoder: msgspec.msgpack.Decoder, message: bytes) -> Any:
    try:
        return decoder.decode(message)
    except msgspec.MsgspecError as error:
        _log.warning("a message of %d bytes was passed over: %s", len(message), error)
        return None


class DraftLink:
    """A verifier's end."""

    def __init__(self, address: str, engine: int, vocab_size: int) -> None:
        """`vocab_size`: of the engine's model; a draft of other tokens is passed over."""
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, f"engine-{engine}".encode())
        self._socket.connect(address)
        self._vocab_size = vocab_size
        self._fresh = True
        self._closed: list[str] = []
        """Requests that have ended and of which the drafter has not heard."""

    @property
    def writable(self) -> bool:
        """Whether a message would be sent: its drafter is there, and not far behind."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def close_streams(self, ids: list[str]) -> None:
        """Tell that these requests have ended: now, or with the next message."""
        self._closed += ids
        if self.writable:
            self.send([], [])

    def send(self, opened: list[Opened], verified: list[Verified]) -> None:
        """Tell of requests. It must be writable."""
        if not (self._closed or opened or verified):
            return
        feedback = Feedback(self._fresh, self._closed, opened, verified)
        self._socket.send(encode(feedback), zmq.NOBLOCK)
        self._fresh, self._closed = False, []

    def receive(self) -> list[Drafted]:
        """Everything that has come."""
        drafted: list[Drafted] = []
        with contextlib.suppress(zmq.Again):
            while True:
                drafted += _decoded(_DRAFTED, self._socket.recv(zmq.NOBLOCK)) or []
        return [told for told in drafted if max(told.token_ids, default=0) < self._vocab_size]

    def close(self) -> None:
        self._socket.close()
