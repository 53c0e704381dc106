"""Clusters that tests start with `ray.cluster_utils`, and their token."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def make_token() -> None:
    """Set a token, unless there is one. `ray.init` makes one for a local Ray, but nodes of
    `ray.cluster_utils` die without one."""
    if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def second_node(namespace: str | None = None, **resources: Any) -> Iterator[Any]:
    """Connect to a cluster of two nodes with these resources each, and yield the second one."""
    import ray
    from ray.cluster_utils import Cluster

    head = resources | {"include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(**resources)
    try:
        ray.init(cluster.address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        yield node
    finally:
        ray.shutdown()
        cluster.shutdown()
