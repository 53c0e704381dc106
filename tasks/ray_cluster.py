"""The Ray cluster of a flow: the one that RAY_ADDRESS names, or one of its own."""

import logging
import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


@contextmanager
def ray_cluster(name: str, gpus_wanted: int, wanted_for: str) -> Generator[int]:
    """The number of its GPUs; 0 means that everything runs on CPUs. Left when the block ends.

    Raises ValueError when it has GPUs, but fewer than `gpus_wanted`.
    """
    import ray

    on_sigterm = signal.getsignal(signal.SIGTERM)
    address = os.environ.get("RAY_ADDRESS", "local")
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    ray.init(
        address=address,
        namespace=f"refrain-{name}-{int(time.time())}",
        log_to_driver=False,
        logging_level=logging.ERROR,
        **local,
    )
    # Ray installs its own handler, under which a cancelled run would end as crashed.
    signal.signal(signal.SIGTERM, on_sigterm)
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        if num_gpus and gpus_wanted > num_gpus:
            raise ValueError(
                f"{wanted_for} need {gpus_wanted} GPUs; the cluster has {num_gpus}: lower them"
            )
        yield num_gpus
    finally:
        ray.shutdown()
