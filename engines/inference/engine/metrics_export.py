"""Export vLLM's metrics of an engine through Ray's metrics."""

from typing import Any


def stat_loggers(wanted: bool) -> list[Any] | None:
    """Return vLLM's loggers that export each step through Ray, or None if not `wanted`."""
    if not wanted:
        return None
    from ray.util import metrics
    from vllm.v1.metrics import ray_wrappers

    # vLLM finds Ray's metrics only if Ray Serve is installed, so set them here.
    ray_wrappers.ray_metrics = metrics
    return [ray_wrappers.RayPrometheusStatLogger]
