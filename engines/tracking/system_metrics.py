"""System metrics of the driver's machine during a run, measured by MLflow's monitors."""

import os
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from refrain.engines.failures import Failures

_SWITCH = "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING"
_END_S = 10.0


@contextmanager
def system_metrics(
    log: Callable[[Mapping[str, float]], None], failures: Failures
) -> Generator[None]:
    """Measure system metrics on a thread and pass them to `log` under MLflow's names `system/NAME`.

    The interval is `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` seconds (default 10). Set
    `MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING` to false to turn them off. MLflow's own thread is not
    used, because it stops the first time that its server does not answer.
    """
    from mlflow.environment_variables import MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL

    if os.environ.get(_SWITCH, "true").lower() in ("false", "0"):
        yield
        return
    every_s = MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL.get() or 10.0
    ended = threading.Event()

    def watch() -> None:
        with failures.contained("system metrics"):
            monitors = _monitors()
            _look(monitors)  # Each measurement covers the time since the one before.
            while not ended.wait(every_s):
                with failures.contained("system metrics"):
                    log(_look(monitors))

    thread = threading.Thread(target=watch, daemon=True, name="system metrics")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_END_S)


def _monitors() -> list[Any]:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    monitors: list[Any] = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    # This fails without NVIDIA's library or without a GPU.
    with suppress(ImportError, RuntimeError):
        monitors.append(GPUMonitor())
    return monitors


def _look(monitors: list[Any]) -> dict[str, float]:
    seen: dict[str, float] = {}
    for monitor in monitors:
        monitor.clear_metrics()
        monitor.collect_metrics()
        seen |= {f"system/{name}": value for name, value in monitor.aggregate_metrics().items()}
    return seen
