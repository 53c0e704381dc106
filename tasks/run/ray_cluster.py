"""The Ray cluster of a flow: the one that RAY_ADDRESS names, or one of its own."""

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

from engines.bounded import ask_aside, together
from engines.gpus.placement import GpuPlacement, Wanted, place
from engines.private import private_dir, private_path, read_secret
from engines.shared_memory import clear_dead

ANSWER_S = 10.0
"""Longest time until a cluster answers."""
FREE_S = 30.0
"""Longest time until GPUs are free: those of a run that has just ended come back after seconds."""
ENDING_S = 10.0
"""Longest time until the processes of a cluster that was shut down have ended."""
SILENCE_S = 25.0
"""Longest time until a head answers a run that is under way: on a busy machine it may take 10 s."""
LOOK_S = 2.0
"""Seconds between two looks whether Ray lives."""
_TOKEN_PATH = "RAY_AUTH_TOKEN_PATH"
_MAX_PLACE_BYTES = 30
"""Longest path of a directory for temporary files that Ray's sockets still have room in: their own
names take up to 75 bytes of 107."""
FORWARDED = (
    "DO_NOT_TRACK",
    "HF_HUB_OFFLINE",
    "REFRAIN_RUN_DIR",
    "TOKENIZERS_PARALLELISM",
    "VLLM_NO_USAGE_STATS",
)
"""Environment variables that the driver's processes on a cluster get from it; those of a Ray of its
own inherit all."""
T = TypeVar("T")


class RayDied(RuntimeError):
    """Ray itself is dead on this machine, or at its head, or does not answer."""


def names_cluster() -> bool:
    """Whether RAY_ADDRESS names one, rather than leave a run to a Ray of its own."""
    return os.environ.get("RAY_ADDRESS", "local") != "local"


@contextmanager
def ray_cluster(name: str, wanted: Sequence[Wanted] = ()) -> Generator[GpuPlacement]:
    """Its GPUs, and whose they are to be. Left when the block ends. Raises ValueError when it has
    GPUs, but no room for what is wanted, or others keep it."""
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
        # Engines that were killed could not; on other nodes the next engine to start does.
        psutil.wait_procs(workers, ENDING_S)
        clear_dead()
    # Where the block has failed, somebody may want its logs.
    if session and not names_cluster():
        shutil.rmtree(session, ignore_errors=True)


def ray_files() -> Path:
    """Return where Ray keeps logs, sockets and what it spills, on each node: a directory of this
    user alone, unless RAY_ADDRESS names a cluster, which has its own."""
    return Path("/tmp/ray") if names_cluster() else private_path("ray", _temporary())


def ray_logs() -> Path:
    """Return the directory of the logs of the Ray that was started last."""
    return ray_files() / "session_latest" / "logs"


def token_file() -> Path | None:
    """Return the file with the token that processes which join this one's cluster must have; None
    where it is in no file."""
    return Path(os.environ[_TOKEN_PATH]) if os.environ.get(_TOKEN_PATH) else None


def _temporary() -> str:
    place = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= _MAX_PLACE_BYTES else "/tmp"


def _has_token() -> bool:
    return any(os.environ.get(name) for name in ("RAY_AUTH_TOKEN", _TOKEN_PATH))


def _placed(wanted: Sequence[Wanted]) -> dict[str, tuple[str, ...]]:
    """Nodes for what is wanted, once the GPUs are free. Raises ValueError when they are not soon:
    engines would wait for them as long as they may take to start."""
    from ray._private import state

    place(wanted, _gpus_of(state.total_resources_per_node()))
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            return place(wanted, _gpus_of(state.available_resources_per_node()))
        except ValueError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"{error}. Others on the cluster keep what is not free: `ray status` says who"
                ) from None
        time.sleep(0.5)


def _gpus_of(resources: Mapping[str, Mapping[str, float]]) -> dict[str, int]:
    found = {node: int(of_node.get("GPU", 0)) for node, of_node in resources.items()}
    return {node: num for node, num in found.items() if num}


@asynccontextmanager
async def while_ray_lives(advice: str, needed: Mapping[str, str] = {}) -> AsyncGenerator[None]:
    """End the block with `RayDied` and this advice soon after Ray's death: a process of Ray's that
    this one has started is missed after `LOOK_S`, a silent head after `SILENCE_S` more, and this
    machine's node when Ray gives it up, after some 15 s. Nodes elsewhere may come and go, but for
    those that are `needed`: node -> what for."""
    watch = _RayWatch(needed)
    try:
        async with together() as group:
            looking = group.create_task(watch.end_with_ray())
            yield
            looking.cancel()
    except Exception as error:
        # Whatever failed first may have failed of this.
        if why := watch.died or watch.missing():
            watch.kill()
            raise RayDied(f"Ray has died under the run: {why}. {advice}") from error
        raise


class _RayWatch:
    """Looks whether Ray lives."""

    def __init__(self, needed: Mapping[str, str]) -> None:
        import ray

        context = ray.get_runtime_context()
        self._needed = {**needed, context.get_node_id(): "this machine"}
        self._address = context.gcs_address
        children = {child: child.name() for child in psutil.Process().children()}
        self._own = {child: n for child, n in children.items() if n in ("raylet", "gcs_server")}
        self.died = ""
        """Sentence that says what is dead, once something is."""

    async def end_with_ray(self) -> None:
        """Raises RuntimeError when something is dead."""
        while not self.died:
            await asyncio.sleep(LOOK_S)
            self.died = self.missing() or await self._silent()
        raise RuntimeError(self.died)

    def missing(self) -> str:
        """Processes of this one's own Ray that have ended, in a sentence; "" when none has."""
        ended = (name for process, name in self._own.items() if _has_ended(process))
        return ", ".join(f"its {name} was killed or crashed" for name in ended)

    def kill(self) -> None:
        """Kill what is left of this one's own Ray: to part from a silent head takes minutes."""
        for process in self._own:
            with suppress(psutil.NoSuchProcess):
                for own in [*process.children(recursive=True), process]:
                    own.kill()

    async def _silent(self) -> str:
        import ray

        try:
            nodes = await ask_aside(ray.nodes, SILENCE_S)
        except TimeoutError:
            return f"its head at {self._address} has not answered for {SILENCE_S:.0f} s"
        living = {node["NodeID"] for node in nodes if node["Alive"]}
        dead = sorted(what for node, what in self._needed.items() if node not in living)
        return f"the node of {', '.join(dead)} is dead" if dead else ""


def _workers() -> list[psutil.Process]:
    """Processes of this one's own Ray node, and what they have started."""
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
    """Make this process one of a run's. `token`: the file with its cluster's, where the environment
    has none. Raises ConnectionError when nobody answers there, ValueError when it is in another
    cluster."""
    import ray

    _require_answer(address)
    if token and not _has_token():
        os.environ[_TOKEN_PATH] = str(token)
    if not ray.is_initialized():
        _init(address=address, namespace=namespace)
    if (here := ray.get_runtime_context().gcs_address) != address:
        raise ValueError(f"this process is in the Ray cluster {here}, not in {address}: leave it")


def _init(**options: Any) -> Path:
    """Join a cluster, or start one; returns the directory of Ray's session on this node."""
    import ray
    from ray.job_config import JobConfig

    class Job(JobConfig):
        """Ray's own puts the working directory first in the workers' `sys.path`, where a user may
        have packages of refrain's names."""

        def _runtime_env_has_working_dir(self) -> bool:
            return True

    here = str(Path(__file__).resolve().parents[2])
    # That of a checkout; Python's own are in every worker's path, behind the standard library.
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
        # Ray installs its own handler, under which a cancelled run would end as crashed.
        signal.signal(signal.SIGTERM, on_sigterm)
    return Path(context.address_info["session_dir"])


def _twice(start: Callable[[], T]) -> T:
    """Start Ray, once more where the machine is too busy: Ray waits 30 s for its own processes, and
    raises a bare Exception then. Raises RuntimeError after the second time."""
    late: Exception | None = None
    for _ in range(2):
        try:
            return start()
        except Exception as error:
            if type(error) is not Exception:
                raise
            late = error
    raise RuntimeError(
        f"Ray did not start: {late} It was tried twice. Start again when other programs have left "
        "some cores free"
    ) from late


def _require_answer(address: str) -> None:
    # Ray itself would try for longer than ten minutes.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(f"no Ray answers at {address}: {error}") from error


def _where(address: str) -> dict[str, Any]:
    if address == "local":
        # Ray makes its directories for everybody to write to, and its token for everybody to read.
        place = private_dir("ray", _temporary())
        if not _has_token():
            token = place.with_name("ray_token")
            read_secret(token, lambda: secrets.token_hex(32))
            os.environ[_TOKEN_PATH] = str(token)
        return {"address": address, "include_dashboard": False, "_temp_dir": str(place)}
    forwarded = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    return {"address": address, "runtime_env": {"env_vars": forwarded}}
