"""Ranks on one node meet at a file that other users cannot open. On several, they use a port."""

import stat
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import ray.util

from refrain.engines.learn.rendezvous import Rendezvous
from tests.sockets import listeners


def num_listeners() -> int:
    return len(listeners([psutil.Process()]))


@pytest.mark.parametrize("one_node", [True, False])
def test_ranks_meet(one_node: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    first, second = (Rendezvous(2, timedelta(seconds=30.0)) for _ in range(2))
    before = num_listeners()
    address = first.host(one_node=one_node)
    one, other = first.open(address), second.open(address)
    one.set("key", "value")
    assert other.get("key") == b"value"
    assert num_listeners() - before == int(not one_node)
    if one_node:
        file = Path(address.removeprefix("file://"))
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        del one, other
        first.close()
        assert not file.parent.exists()
