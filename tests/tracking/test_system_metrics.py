"""System metrics of MLflow's monitors are logged while the run goes on, and stop with it."""

import threading
import time
from pathlib import Path

import pytest

from refrain.engines.failures import Failures
from refrain.engines.tracking.system_metrics import system_metrics

EVERY_S = 0.05


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", str(EVERY_S))


def test_system_metrics_are_logged_until_the_run_ends(tmp_path: Path) -> None:
    seen, enough = [], threading.Event()

    def log(metrics):
        seen.append(dict(metrics))
        if len(seen) == 3:
            enough.set()

    with system_metrics(log, Failures(tmp_path)):
        assert enough.wait(30.0)
    number = len(seen)
    time.sleep(4 * EVERY_S)
    assert len(seen) == number
    names = {
        "cpu_utilization_percentage",
        "system_memory_usage_megabytes",
        "network_receive_megabytes",
    }
    for metrics in seen:
        assert {f"system/{name}" for name in names} <= metrics.keys()
        assert 0 < metrics["system/disk_usage_percentage"] <= 100


def test_first_sample_covers_the_time_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A processor's load is measured between two samples: the first alone would be 0."""
    looks, told = [], threading.Event()
    monkeypatch.setattr(
        "refrain.engines.tracking.system_metrics._look",
        lambda _: {"look": len(looks.append(0) or looks)},
    )
    first = []

    def log(seen):
        first.append(seen["look"])
        told.set()

    with system_metrics(log, Failures(tmp_path)):
        assert told.wait(30.0)
    assert first[0] == 2


def test_mlflows_own_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "false")
    before = threading.active_count()
    with system_metrics(lambda _: pytest.fail("looked"), Failures(tmp_path)):
        assert threading.active_count() == before
        time.sleep(4 * EVERY_S)


def test_failed_sample_is_not_the_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record_failures: list
) -> None:
    looks, enough = [], threading.Event()

    def log(_: object) -> None:
        looks.append(0)
        if len(looks) == 3:
            enough.set()
        raise OSError("No space left on device")

    monkeypatch.setattr("refrain.engines.tracking.system_metrics._look", lambda _: {})
    with system_metrics(log, Failures(tmp_path)):
        assert enough.wait(30.0)
    assert {what for what, _ in record_failures} == {"system metrics"}
    record_failures.clear()
