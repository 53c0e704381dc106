"""Messages between verifiers (rollout engines) and drafters: MessagePack over ZeroMQ.

The drafter binds a ROUTER socket. Each rollout engine connects a DEALER socket to it. After a step,
the sender puts the new tokens of all its requests into one message, so messages do not grow with
the context. Messages arrive in order, and nobody waits for one.

Drafts are optional. An engine sends nothing while its drafter is dead or far behind, and reopens
the affected requests later. The receiver logs and skips a message that it cannot decode: such a
message must not stop an engine, nor a drafter that serves other engines too.
"""

import contextlib
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from refrain.engines.specactor.streams import Drafted, Opened, Verified


@dataclass(frozen=True, slots=True)
class Feedback:
    """What one step of a verifier sends to a drafter. Process the fields in this order."""

    fresh: bool = False
    """Whether this is the verifier's first message. The drafter then closes its older streams."""
    closed: list[str] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)


_log = logging.getLogger(__name__)
_FEEDBACK = msgspec.msgpack.Decoder(Feedback)
_DRAFTED = msgspec.msgpack.Decoder(list[Drafted])
encode = msgspec.msgpack.encode


def decode_feedback(message: bytes) -> Feedback | None:
    """Return the decoded message, or None if it is malformed."""
    return _decoded(_FEEDBACK, message)


def _decoded(decoder: msgspec.msgpack.Decoder, message: bytes) -> Any:
    try:
        return decoder.decode(message)
    except msgspec.MsgspecError as error:
        _log.warning("skipped a message of %d bytes: %s", len(message), error)
        return None


class DraftLink:
    """The verifier's end of the connection to one drafter."""

    def __init__(self, address: str, engine: int, vocab_size: int) -> None:
        """Connect to a drafter. `vocab_size`: the policy's; drafts with larger ids are skipped."""
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, f"engine-{engine}".encode())
        self._socket.connect(address)
        self._vocab_size = vocab_size
        self._fresh = True
        self._closed: list[str] = []
        """Ended requests that were not reported to the drafter yet."""

    @property
    def writable(self) -> bool:
        """Whether a message can be sent: the drafter is alive and not far behind."""
        return bool(self._socket.poll(0, zmq.POLLOUT))

    def close_streams(self, ids: list[str]) -> None:
        """Report these requests as ended, now or with the next message."""
        self._closed += ids
        if self.writable:
            self.send([], [])

    def send(self, opened: list[Opened], verified: list[Verified]) -> None:
        """Send new requests and verified tokens. Call only while the link is `writable`."""
        if not (self._closed or opened or verified):
            return
        feedback = Feedback(self._fresh, self._closed, opened, verified)
        self._socket.send(encode(feedback), zmq.NOBLOCK)
        self._fresh, self._closed = False, []

    def receive(self) -> list[Drafted]:
        """Return all drafts that have arrived, without waiting."""
        drafted: list[Drafted] = []
        with contextlib.suppress(zmq.Again):
            while True:
                drafted += _decoded(_DRAFTED, self._socket.recv(zmq.NOBLOCK)) or []
        return [told for told in drafted if max(told.token_ids, default=0) < self._vocab_size]

    def close(self) -> None:
        self._socket.close()
