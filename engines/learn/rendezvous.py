"""Meeting place of a trainer's ranks: the key-value store of torch.distributed.

On one node it is a file that no other user can open. Across nodes it is a port, and anyone who can
reach this port can read and write the store.
"""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING

import ray

from refrain.engines.shared_memory import PrivateDir

if TYPE_CHECKING:
    from torch.distributed import FileStore, TCPStore

_FILE, _TCP = "file://", "tcp://"


class Rendezvous:
    """One rank's access to the store."""

    def __init__(self, world_size: int, timeout: timedelta) -> None:
        self._world_size, self._timeout = world_size, timeout
        self._dir: PrivateDir | None = None
        self._hosted: TCPStore | None = None

    def host(self, *, one_node: bool) -> str:
        """Open the store on this node and return its address. `one_node`: all ranks are on this
        node."""
        if one_node:
            self._dir = PrivateDir()
            return f"{_FILE}{self._dir.path}/ranks"
        host = ray.util.get_node_ip_address()
        # By default torch would listen on every address of the machine.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._hosted = self._open_port(host, port, listener.detach())
        return f"{_TCP}{host}:{port}"

    def open(self, address: str) -> "FileStore | TCPStore":
        """Return the store that rank 0 hosts."""
        if address.startswith(_FILE):
            from torch.distributed import FileStore

            return FileStore(address.removeprefix(_FILE), self._world_size)
        host, _, port = address.removeprefix(_TCP).rpartition(":")
        return self._hosted or self._open_port(host, int(port))

    def close(self) -> None:
        if self._dir:
            self._dir.delete()
            self._dir = None

    def _open_port(self, host: str, port: int, listener: int | None = None) -> "TCPStore":
        from torch.distributed import TCPStore

        return TCPStore(
            host,
            port,
            world_size=self._world_size,
            is_master=listener is not None,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
