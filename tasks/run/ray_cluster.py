"""The Ray cluster of a flow: the one at RAY_ADDRESS, or a local one that the flow starts."""

import asyncio
import logging
import os
import secrets
import shutil
import signal
import socket
import sysconfig
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

from refrain.engines.bounded import call_in_thread, together
from refrain.engines.gpus.placement import GpuPlacement, Wanted, place
from refrain.engines.private import private_dir, private_path, read_secret
from refrain.engines.shared_memory import clear_dead

ANSWER_S = 10.0
"""Seconds to wait until a cluster answers."""
FREE_S = 30.0
"""Seconds to wait until GPUs are free. A run that has ended releases its GPUs after seconds."""
ENDING_S = 10.0
"""Seconds to wait until the processes of a stopped cluster have ended."""
SILENCE_S = 25.0
"""Seconds to wait for an answer of the head during a run. On a busy machine it may take 10 s."""
LOOK_S = 2.0
"""Seconds between two checks that Ray is alive."""
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_MAX_PLACE_BYTES = 30
"""Limit on the path of the temporary directory. Ray's socket names add up to 75 bytes, and a socket
path has at most 107."""
FORWARDED = (
    "DO_NOT_TRACK",
    "HF_HUB_OFFLINE",
    "REFRAIN_RUN_DIR",
    "TOKENIZERS_PARALLELISM",
    "VLLM_NO_USAGE_STATS",
)
"""Environment variables that the driver passes to its processes on a cluster. On a local Ray, they
inherit all variables."""
T = TypeVar("T")


class RayDied(RuntimeError):
    """Ray on this machine or its head node has died or does not answer."""


def names_cluster() -> bool:
    """Return whether RAY_ADDRESS names a cluster. Otherwise a run starts a local Ray."""
    return os.environ.get("RAY_ADDRESS", "local") != "local"


@contextmanager
def ray_cluster(name: str, wanted: Sequence[Wanted] = ()) -> Generator[GpuPlacement]:
    """Join or start a Ray cluster, and leave it after the block. Yield its number of GPUs and the
    nodes of each part of the run that is `wanted`.

    Raise ValueError when the cluster has GPUs, but too few, or when others use them.
    """
    import ray

    where = _where(os.environ.get("RAY_ADDRESS", "local"))
    clear_dead()
    session = _init(namespace=f"refrain-{name}-{int(time.time())}", **where)
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        nodes = _placed(wanted) if num_gpus else {}
        yield GpuPlacement(num_gpus, nodes)
    finally:
        workers = _workers()
        ray.shutdown()
        # Free the shared memory of killed engines here. On other nodes, the next engine does it.
        psutil.wait_procs(workers, ENDING_S)
        clear_dead()
    # After a failure the logs stay, because the user may need them.
    if session and not names_cluster():
        shutil.rmtree(session, ignore_errors=True)


def ray_files() -> Path:
    """Return the directory of Ray's logs, sockets and spilled objects on each node. A local Ray has
    a private directory of this user. A cluster (RAY_ADDRESS) has its own."""
    return Path("/tmp/ray") if names_cluster() else private_path("ray", _temporary())


def ray_logs() -> Path:
    """Return the log directory of the Ray session that was started last."""
    return ray_files() / "session_latest" / "logs"


def token_file() -> Path | None:
    """Return the file with the cluster's token, which other processes need to join. None: the
    token is not in a file."""
    return Path(os.environ[_TOKEN_PATH]) if os.environ.get(_TOKEN_PATH) else None


def _temporary() -> str:
    place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= _MAX_PLACE_BYTES else "/tmp"


def _has_token() -> bool:
    return any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", _TOKEN_PATH))


def _placed(wanted: Sequence[Wanted]) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each wanted part, as soon as their GPUs are free.

    Raise ValueError after `FREE_S` seconds. Without this limit, engines would wait for GPUs during
    their whole start timeout.
    """
    from ray._private import state

    place(wanted, _gpus_of(state.total_resources_per_node()))
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            return place(wanted, _gpus_of(state.available_resources_per_node()))
        except ValueError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{error}. Other jobs use the other GPUs: `ray status` shows them"
                ) from None
        time.sleep(0.5)


def _gpus_of(resources: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    found = {node: int(of_node.get("GPU", 0)) for node, of_node in resources.items()}
    return {node: num for node, num in found.items() if num}


@asynccontextmanager
async def while_ray_lives(advice: str, needed: Mapping[str, str] = {}) -> AsyncGenerator[None]:
    """End the block with `RayDied` and this advice soon after Ray's death.

    This finds a dead process of a local Ray after `LOOK_S`, a silent head after `SILENCE_S` more,
    and a dead node of this machine after some 15 s, when Ray gives it up. Other nodes may come and
    go, except those that are `needed` (node -> purpose).
    """
    watch = _RayWatch(needed)
    try:
        async with together() as group:
            looking = group.create_task(watch.end_with_ray())
            yield
            looking.cancel()
    except Exception as error:
        # Any error may be a consequence of Ray's death, so check that first.
        if why := watch.died or watch.missing():
            watch.kill()
            raise RayDied(f"Ray has died under the run: {why}. {advice}") from error
        raise


class _RayWatch:
    """Checks whether Ray is alive."""

    def __init__(self, needed: Mapping[str, str]) -> None:
        import ray

        context = ray.get_runtime_context()
        self._needed = {**needed, context.get_node_id(): "this machine"}
        self._address = context.gcs_address
        children = {child: child.name() for child in psutil.Process().children()}
        self._own = {child: n for child, n in children.items() if n in ("raylet", "gcs_server")}
        self.died = ""
        """Sentence about the dead part of Ray. Empty while all parts are alive."""

    async def end_with_ray(self) -> None:
        """Check until a part of Ray is dead, then raise RuntimeError."""
        while not self.died:
            await asyncio.sleep(LOOK_S)
            self.died = self.missing() or await self._silent()
        raise RuntimeError(self.died)

    def missing(self) -> str:
        """Return a sentence about ended processes of the local Ray. Empty: none has ended."""
        ended = (name for process, name in self._own.items() if _has_ended(process))
        return ", ".join(f"its {name} was killed or crashed" for name in ended)

    def kill(self) -> None:
        """Kill what is left of the local Ray. Leaving a silent head in the normal way takes
        minutes."""
        for process in self._own:
            with suppress(psutil.NoSuchProcess):
                for own in [*process.children(recursive=True), process]:
                    own.kill()

    async def _silent(self) -> str:
        import ray

        try:
            nodes = await call_in_thread(ray.nodes, SILENCE_S)
        except TimeoutError:
            return f"its head at {self._address} has not answered for {SILENCE_S:.0f} s"
        living = {node["NodeID"] for node in nodes if node["Alive"]}
        dead = sorted(what for node, what in self._needed.items() if node not in living)
        return f"the node of {', '.join(dead)} is dead" if dead else ""


def _workers() -> list[psutil.Process]:
    """Return the processes of the local Ray node and their descendants."""
    workers = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            workers += child.children(recursive=True) if child.name() == "raylet" else []
    return workers


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def join_cluster(address: str, namespace: str, token: Path | None = None) -> None:
    """Let this process join the Ray cluster of a run.

    `token`: the file with the cluster's token, if the environment has none. Raise ConnectionError
    when the address does not answer, and ValueError when this process is in another cluster.
    """
    import ray

    _require_answer(address)
    if token and not _has_token():
        os.environ[_TOKEN_PATH] = str(token)
    if not ray.is_initialized():
        _init(address=address, namespace=namespace)
    if (here := ray.get_runtime_context().gcs_address) != address:
        raise ValueError(
            f"this process is in the Ray cluster {here}, not in {address}: call ray.shutdown()"
        )


def _init(**options: Any) -> Path:
    """Join or start a cluster. Return the directory of Ray's session on this node."""
    import ray
    from ray.job_config import JobConfig

    class Job(JobConfig):
        """A job config that keeps the working directory out of the workers' `sys.path`. Ray puts it
        first, and a user's packages there may have the names of refrain's."""

        def _runtime_env_has_working_dir(self) -> bool:
            return True

    here = str(Path(__file__).resolve().parents[2])
    # Add the directory of a checkout. Workers have Python's own directories in their path already.
    path = [] if here in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")) else [here]
    on_sigterm = signal.getsignal(signal.SIGTERM)
    context: Any = _twice(
        lambda: ray.init(
            log_to_driver=False,
            logging_level=logging.ERROR,
            job_config=Job(_py_driver_sys_path=path),
            **options,
        )
    )
    if threading.current_thread() is threading.main_thread():
        # Ray installs its own handler. With it, a cancelled run would end as crashed.
        signal.signal(signal.SIGTERM, on_sigterm)
    return Path(context.address_info["session_dir"])


def _twice(start: Callable[[], T]) -> T:
    """Start Ray, and try again once if the machine is too busy: Ray waits 30 s for its processes,
    then raises a bare Exception. Raise RuntimeError after the second try."""
    late: Exception | None = None
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if type(error) is not Exception:
                raise
            late = error
    raise RuntimeError(
        f"Ray did not start in two tries: {late} Start again when other programs leave some cores "
        "free"
    ) from late


def _require_answer(address: str) -> None:
    # Check this first, because Ray would try for more than ten minutes.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(f"no Ray answers at {address}: {error}") from error


def _where(address: str) -> dict[str, Any]:
    if address == "local":
        # Make both here: Ray's own directories are world-writable and its token is world-readable.
        place = private_dir("ray", _temporary())
        if not _has_token():
            token = place.with_name("ray_token")
            read_secret(token, lambda: secrets.token_hex(32))
            os.environ[_TOKEN_PATH] = str(token)
        return {"address": address, "include_dashboard": False, "_temp_dir": str(place)}
    forwarded = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    return {"address": address, "runtime_env": {"env_vars": forwarded}}
