"""The wire between verifiers and drafters: MessagePack over ZeroMQ.

A drafter binds a ROUTER and every rollout engine connects a DEALER to it. Messages keep their
order; none is waited for unless the caller says so. One that cannot be sent, as its drafter is gone
or far behind, is dropped: drafts are optional, and with the next `connect` all begins anew.
"""

import contextlib
from dataclasses import dataclass, field

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


_FEEDBACK = msgspec.msgpack.Decoder(Feedback)
_DRAFTED = msgspec.msgpack.Decoder(Drafted)
encode = msgspec.msgpack.encode
decode_feedback = _FEEDBACK.decode


class DraftLink:
    """A verifier's end."""

    def __init__(self, address: str, engine: int) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, f"engine-{engine}".encode())
        self._socket.connect(address)
        self._fresh = True

    def send(self, closed: list[str], opened: list[Opened], verified: list[Verified]) -> None:
        if not (closed or opened or verified):
            return
        feedback = Feedback(self._fresh, closed, opened, verified)
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(feedback), zmq.NOBLOCK)
            self._fresh = False

    def receive(self, timeout_s: float = 0.0) -> list[Drafted]:
        """Everything that has come; waits so long for the first."""
        drafted = []
        if self._socket.poll(int(timeout_s * 1000)):
            with contextlib.suppress(zmq.Again):
                while True:
                    drafted.append(_DRAFTED.decode(self._socket.recv(zmq.NOBLOCK)))
        return drafted

    def close(self) -> None:
        self._socket.close()
