"""The Ray cluster of a flow: the one that RAY_ADDRESS names, or one of its own."""

import logging
import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

ANSWER_S = 10.0
"""Longest time until a cluster answers."""
FORWARDED = (
    "DO_NOT_TRACK",
    "HF_HUB_OFFLINE",
    "REFRAIN_RUN_DIR",
    "TOKENIZERS_PARALLELISM",
    "VLLM_NO_USAGE_STATS",
)
"""Environment variables that the driver's processes on a cluster get from it; those of a Ray of its
own inherit all."""


@contextmanager
def ray_cluster(name: str, gpus_wanted: int, wanted_for: str) -> Generator[int]:
    """The number of its GPUs; 0 means that everything runs on CPUs. Left when the block ends.
    Raises ValueError when it has GPUs, but fewer than `gpus_wanted`."""
    import ray

    where = _where(os.environ.get("RAY_ADDRESS", "local"))
    _init(namespace=f"refrain-{name}-{int(time.time())}", **where)
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if num_gpus and gpus_wanted > num_gpus:
            raise ValueError(
                f"{wanted_for} need {gpus_wanted} GPUs; the cluster has {num_gpus}: lower them"
            )
        yield num_gpus
    finally:
        ray.shutdown()


def join_cluster(address: str, namespace: str) -> None:
    """Make this process one of a run's. Raises ConnectionError when nobody answers there,
    ValueError when it is in another cluster."""
    import ray

    _require_answer(address)
    if not ray.is_initialized():
        _init(address=address, namespace=namespace)
    if (here := ray.get_runtime_context().gcs_address) != address:
        raise ValueError(f"this process is in the Ray cluster {here}, not in {address}: leave it")


def _init(**options: Any) -> None:
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    # Ray installs its own handler, under which a cancelled run would end as crashed.
    signal.signal(signal.SIGTERM, on_sigterm)


def _require_answer(address: str) -> None:
    # Ray itself would try for longer than ten minutes.
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise ConnectionError(f"no Ray answers at {address}: {error}") from error


def _where(address: str) -> dict[str, Any]:
    if address == "local":
        return {"address": address, "include_dashboard": False}
    forwarded = {name: os.environ[name] for name in FORWARDED if name in os.environ}
    return {"address": address, "runtime_env": {"env_vars": forwarded}}
