"""Negative control of `assert_on_loopback`: it fails when another machine could connect."""

import socket

import psutil
import pytest

from tests.sockets import assert_on_loopback


@pytest.mark.parametrize(
    ("kind", "family", "address", "reachable"),
    [
        (socket.SOCK_STREAM, socket.AF_INET, "127.0.0.1", False),
        (socket.SOCK_STREAM, socket.AF_INET6, "::ffff:127.0.0.1", False),
        (socket.SOCK_STREAM, socket.AF_INET, "0.0.0.0", True),
        (socket.SOCK_STREAM, socket.AF_INET6, "::", True),
        (socket.SOCK_DGRAM, socket.AF_INET, "0.0.0.0", True),
        (socket.SOCK_DGRAM, socket.AF_INET, "127.0.0.1", False),
    ],
)
def test_reachable_sockets_are_found(kind, family, address, reachable) -> None:
    with socket.socket(family, kind) as one:
        one.bind((address, 0))
        if kind is socket.SOCK_STREAM:
            one.listen()
        if reachable:
            with pytest.raises(AssertionError, match=str(one.getsockname()[1])):
                assert_on_loopback([psutil.Process()], at_least=1)
        else:
            assert_on_loopback([psutil.Process()], at_least=1)


def test_something_must_listen() -> None:
    with pytest.raises(AssertionError):
        assert_on_loopback([], at_least=1)
