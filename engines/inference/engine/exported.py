"""vLLM's metrics of an engine, exported with those of its Ray node."""

from typing import Any


def stat_loggers(wanted: bool) -> list[Any] | None:
    """Loggers that vLLM reports each step of an engine to: in an actor of Ray, its own one for
    that."""
    if not wanted:
        return None
    from ray.util import metrics
    from vllm.v1.metrics import ray_wrappers

    # It takes them along with Ray Serve or not at all, and Serve is not installed.
    ray_wrappers.ray_metrics = metrics
    return [ray_wrappers.RayPrometheusStatLogger]
