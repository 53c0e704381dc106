"""The sockets on which processes listen, and whether another machine could reach them."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterable

import psutil


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def family(process: psutil.Process | None = None) -> list[psutil.Process]:
    """Return a process, by default this one, and all its descendants."""
    process = process or psutil.Process()
    return [process, *process.children(recursive=True)]


def listeners(processes: Iterable[psutil.Process]) -> list[tuple[str, str, int]]:
    """Return (command, address, port) of each socket that accepts connections or datagrams."""
    found = []
    for process in set(processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline()[:8])
            for one in process.net_connections("inet"):
                open_to_all = one.type is socket.SOCK_DGRAM and not one.raddr
                if one.status == psutil.CONN_LISTEN or open_to_all:
                    found.append((command, one.laddr.ip, one.laddr.port))
    return found


def assert_on_loopback(processes: Iterable[psutil.Process], at_least: int) -> None:
    """Assert that at least this many sockets listen, and all of them on loopback addresses."""
    found = listeners(processes)
    assert len(found) >= at_least, found
    reachable = [one for one in found if not _is_loopback(one[1])]
    assert not reachable, reachable


def _is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    # A socket for both protocols shows 127.0.0.1 as ::ffff:127.0.0.1.
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
