"""vLLM's metrics of an engine, exported with those of its Ray node."""

from typing import Any


def stat_loggers(wanted: bool) -> list[Any] | None:
    """Loggers that vLLM reports each step of an engine to: in an actor of Ray, its own one for
    that."""
    if not wanted:
        return None
    from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger

    return [RayPrometheusStatLogger]
