"""A profile's store loses no measurement, and measures nothing twice."""

import os
import signal
import subprocess
import sys

import duckdb
import pytest

from refrain.engines.store.profiles import ProfileStore
from refrain.engines.store.store import Store
from refrain.schemas.latency import Accuracy, FitKnot, PointKind, ProfilePoint
from refrain.schemas.profile import MachineFacts, Measurement
from tests.conftest import REPOSITORY

FACTS = MachineFacts(
    hardware="an abacus", max_active_tokens=1000, max_step_tokens=100, versions={"vllm": "0"}
)
MEASUREMENT = Measurement(kind=PointKind.DECODE, tp_degree=1, batch=2, prompt_tokens=10)
DECODE = ProfilePoint(kind=PointKind.DECODE, batch=2, context_tokens=80, seconds=0.1, num_repeats=9)
PREFILL = ProfilePoint(kind=PointKind.PREFILL, batch=2, rms_tokens=10.0, seconds=0.2)

KNOT = FitKnot(
    kind=PointKind.DECODE, tp_degree=1, drafter=None, batch=2, window=0, x=80.0, seconds=0.1
)
ACCURACY = Accuracy(
    kind=PointKind.DECODE, num_points=3, num_extrapolated=0, median_error=0.1, p90_error=0.2
)


@pytest.fixture
def store(tmp_path):
    store = ProfileStore(tmp_path / "profile.duckdb")
    yield store
    store.close()


def test_measurements_survive_reopening(tmp_path, store):
    draft = MEASUREMENT.model_copy(
        update={"kind": PointKind.DRAFT, "window": 4, "drafter": "ngram"}
    )
    drafted = ProfilePoint(kind=PointKind.DRAFT, batch=2, window=4, drafter="ngram", seconds=0.3)
    store.add(0, MEASUREMENT, [PREFILL, DECODE])
    store.add(1, draft, [drafted])
    store.close()
    again = ProfileStore(tmp_path / "profile.duckdb")
    assert again.measured() == {(0, MEASUREMENT), (1, draft)}
    assert set(again.points()) == {DECODE, PREFILL, drafted}
    again.close()


def test_measurement_is_stored_with_all_its_points(tmp_path, store):
    broken = PREFILL.model_copy(update={"seconds": None})
    with pytest.raises(duckdb.Error):
        store.add(0, MEASUREMENT, [DECODE, broken])
    store.close()
    again = ProfileStore(tmp_path / "profile.duckdb")
    assert not again.measured()
    assert not again.points()
    again.close()


def test_killed_writers_leave_whole_measurements(tmp_path):
    program = """
import sys
from pathlib import Path
from refrain.engines.store.profiles import ProfileStore
from tests.store.test_profiles import DECODE, MEASUREMENT, PREFILL
store = ProfileStore(Path(sys.argv[1]))
for index in range(100_000):
    store.add(index, MEASUREMENT, [PREFILL, DECODE])
    print(index, flush=True)
"""
    path = tmp_path / "profile.duckdb"
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(20):
            acknowledged = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    store = ProfileStore(path)
    measured = {index for index, _ in store.measured()}
    assert measured >= set(range(acknowledged + 1))
    assert len(store.points()) == 2 * len(measured)
    store.close()


def test_another_machine_is_refused(store):
    assert store.facts(1) is None
    assert store.check_facts(FACTS, 1) == FACTS
    # A drafting engine may report other limits. Those of the first engine stay.
    other_limits = FACTS.model_copy(update={"max_step_tokens": 7})
    assert store.check_facts(other_limits, 1) == FACTS
    other = FACTS.model_copy(update={"hardware": "a slide rule"})
    for tp_degree in (1, 2):
        with pytest.raises(ValueError, match=r"begun on another machine.*abacus.*--overwrite"):
            store.check_facts(other, tp_degree)
    store.add(0, MEASUREMENT, [DECODE])
    store.replace_fit([KNOT], [("points", ACCURACY)])
    assert store.check_facts(other, 2, anew=True) == store.facts(2) == other
    assert store.facts(1) is None
    assert not store.points()
    assert _fit(store) == ([], [])


def test_each_tp_degree_has_its_own_limits(store):
    larger = FACTS.model_copy(update={"max_active_tokens": 2 * FACTS.max_active_tokens})
    store.check_facts(FACTS, 1)
    assert store.facts(2) is None
    assert store.check_facts(larger, 2) == larger
    assert (store.facts(1), store.facts(2)) == (FACTS, larger)


def test_the_fit_is_replaced_as_a_whole_or_not_at_all(store):
    for _ in range(2):
        store.replace_fit([KNOT], [("points", ACCURACY)])
    fit = [("decode", 1, None, 2, 0, 80.0, 0.1)], [("points", "decode", 3, 0, 0.1, 0.2)]
    assert _fit(store) == fit
    broken = ACCURACY.model_copy(update={"median_error": None})
    with pytest.raises(duckdb.Error):
        store.replace_fit([KNOT, KNOT], [("points", broken)])
    assert _fit(store) == fit
    store.add(0, MEASUREMENT, [DECODE])


def test_a_runs_store_is_no_profile(tmp_path):
    Store(tmp_path / "run.duckdb").close()
    with pytest.raises(ValueError, match="is not a refrain profile"):
        ProfileStore(tmp_path / "run.duckdb")


def _fit(store):
    """Return the rows of the tables of the fit."""
    return tuple(store._con.execute(f"FROM {name}").fetchall() for name in ("fits", "accuracy"))
