"""The store's file: how it is locked, which files it refuses, and what a killed writer leaves."""

import random
import subprocess
import sys
import threading

import pytest

from refrain.engines.store.ddl import SCHEMA_VERSION
from refrain.engines.store.store import Store, open_read_only
from refrain.schemas.rollout import Split
from tests.conftest import REPOSITORY
from tests.store.test_store import add_rollouts, make_rollout


def test_a_closed_store_opens_read_only(tmp_path):
    path = tmp_path / "run.duckdb"
    with Store(path) as store:
        add_rollouts(store, make_rollout())
    with open_read_only(path) as store:
        assert store.rollouts(Split.TRAIN, 1).num_rows == 1
        with pytest.raises(Exception, match="read-only"):
            add_rollouts(store, make_rollout(sample=1))


HOLD = """
import sys, time
from refrain.engines.store.store import Store
store = Store(sys.argv[1]); print("held", flush=True); time.sleep(60)
"""


def test_second_process_learns_who_locks_the_file(tmp_path):
    path = tmp_path / "run.duckdb"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=rf"run.duckdb is held by process {holder.pid}"):
            Store(path)
        threading.Timer(1.0, holder.kill).start()
        Store(path, lock_timeout_s=20.0).close()
    finally:
        holder.kill()
        holder.wait()


def test_files_that_are_no_store_are_refused(tmp_path):
    import duckdb

    other, text, old = tmp_path / "other.duckdb", tmp_path / "notes.txt", tmp_path / "old.duckdb"
    with duckdb.connect(str(other)) as con:
        con.execute("CREATE TABLE t (x INTEGER)")
    text.write_text("not a database at all " * 1000)
    with Store(old) as store:
        store._con.execute("UPDATE meta SET value = '0' WHERE name = 'schema_version'")
    with pytest.raises(ValueError, match=r"other.duckdb is not a refrain store"):
        Store(other)
    with pytest.raises(ValueError, match=r"notes.txt is not a refrain store"):
        Store(text)
    with pytest.raises(ValueError, match=rf"schema version 0, .* version {SCHEMA_VERSION}"):
        Store(old)
    with pytest.raises(ValueError, match="does not exist"):
        open_read_only(tmp_path / "none.duckdb")
    with pytest.raises(ValueError, match="not a directory"):
        Store(tmp_path / "none" / "run.duckdb")
    with pytest.raises(ValueError, match="not a file"):
        Store(tmp_path)


@pytest.mark.parametrize(
    ("what", "fewest"), [("emptied", 1.0), ("cut", 0.9), ("bit", 0.1), ("block", 0.1)]
)
def test_damaged_store_explains_the_fix(tmp_path, what, fewest):
    """DuckDB does not use all bytes of the file. It has checksums for those that it uses."""
    path, seen, num_refused = tmp_path / "run.duckdb", random.Random(3), 0
    with Store(path) as store:
        rollouts = [make_rollout(sample=sample, tokens=50) for sample in range(500)]
        add_rollouts(store, *rollouts)
    whole = path.read_bytes()
    for _ in range(10):
        damaged, at = bytearray(whole), seen.randrange(len(whole))
        match what:
            case "emptied":
                damaged.clear()
            case "cut":
                del damaged[at:]
            case "bit":
                damaged[at] ^= 1 << seen.randrange(8)
            case "block":
                damaged[at : at + 4096] = bytes(len(damaged[at : at + 4096]))
        path.write_bytes(damaged)
        said = verdict(path)
        if said is not None:
            num_refused += 1
            assert "run.duckdb" in said
            assert f"refrain train --resume {tmp_path} --new-store" in said
    assert num_refused >= 10 * fewest


def verdict(path) -> str | None:
    try:
        with open_read_only(path) as store:
            store.verify()
    except ValueError as error:
        return str(error)
    return None


ADD_BATCHES = """
import sys
from refrain.engines.store.store import Store
from tests.store.test_store import add_rollouts, make_rollout
store = Store(sys.argv[1])
for batch in range(10_000):
    rollouts = [make_rollout(step=1, prompt=f"p{batch}", sample=i, tokens=50) for i in range(8)]
    add_rollouts(store, *rollouts)
    print(batch, flush=True)
"""


@pytest.mark.engine
@pytest.mark.parametrize("trial", range(3))
def test_killing_the_writer_loses_no_acknowledged_batch(tmp_path, trial):
    path = tmp_path / "run.duckdb"
    command = [sys.executable, "-c", ADD_BATCHES, str(path)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert writer.stdout is not None
    wanted = random.Random(trial).randrange(5, 60)
    try:
        acknowledged = [int(writer.stdout.readline()) for _ in range(wanted)]
    finally:
        writer.kill()
    acknowledged += [int(line) for line in writer.stdout.read().split("\n")[:-1]]
    writer.wait()
    with open_read_only(path) as store:
        num_rows = store.rollouts(Split.TRAIN, 1).num_rows
    with Store(path) as store:
        assert store.rollouts(Split.TRAIN, 1).num_rows == num_rows
        rows = store.rollouts(Split.TRAIN, 1)
        found = [(row["prompt_key"], row["sample_index"]) for row in rows.to_pylist()]
        assert len(found) == len(set(found))
        assert {(f"p{batch}", i) for batch in acknowledged for i in range(8)} <= set(found)
        assert len(found) % 8 == 0, "a batch must be stored whole or not at all"
        again = [make_rollout(prompt="p0", sample=i, tokens=50) for i in range(8)]
        assert add_rollouts(store, *again) == 0
