"""Old steps move to files. Every reader must find the same rows as in the database, even after a
crash."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copyfile, copytree

import duckdb
import pytest

from refrain.engines.simulate.trace import from_store, measured_s
from refrain.engines.specactor.health import NUM_RECENT
from refrain.engines.store import archive, queries
from refrain.engines.store.store import Store, open_read_only
from refrain.schemas.rollout import Split
from refrain.schemas.step import RolloutOutcome, SampleName
from tests.conftest import REPOSITORY
from tests.flows.directory_snapshots import Entry, tree
from tests.store.test_store import (
    add_rollouts,
    make_deferred,
    make_plan,
    make_report,
    make_rewards,
    make_rollout,
)

NUM_STEPS = 24
PROMPTS = "abcdefg"


def keys_of(step: int) -> list[str]:
    return [PROMPTS[(2 * step + i) % len(PROMPTS)] for i in range(2)]


def add_step(store: Store, step: int) -> None:
    """Add a step of two prompts with two samples each. It defers one sample to the next step."""
    keys, late = keys_of(step), keys_of(step - 1)[0]
    samples = [(key, i) for key in keys for i in range(2)][1:]
    rollouts = [make_rollout(step, *name, tokens=step % 5 + 1, token=step) for name in samples]
    carried = [make_deferred(from_step=step - 1, prompt=late, tokens=9)]
    store.add_plan(make_plan(keys, step, group_size=2))
    left = SampleName(prompt_key=keys[0], sample_index=0)
    took = SampleName(prompt_key=late, sample_index=-1)
    store.add_outcome(Split.TRAIN, step, RolloutOutcome(deferred=(left,), carried=(took,)))
    add_rollouts(store, *rollouts, *carried, epoch=step // 10)
    rewards = [(key, i, step / 8) for key, i in [*samples, (late, -1)]]
    store.add_rewards(Split.TRAIN, step, make_rewards(rewards))
    if step % 3 == 0:
        add_rollouts(store, make_rollout(step, split=Split.VALIDATION))
        store.add_rewards(Split.VALIDATION, step, make_rewards([("a", 0, step / 16)]))
    store.add_step(make_report(step, step // 10))


def add_steps(store: Store, first: int, last: int) -> int:
    """Add these steps, and archive what is due after each. Return how often steps were moved."""
    moved = 0
    for step in range(first, last + 1):
        add_step(store, step)
        moved += store.archive_before(step)
        assert live_steps(store) < 5 + archive.KEPT_STEPS
    return moved


def told(store: Store, num_steps: int = NUM_STEPS) -> dict:
    """Return the answers of all readers."""
    found: dict = {"summary": store.summary(1.0), "times": sorted(map(str, store.engine_times()))}
    for step in (1, 2, 7, 12, 16, num_steps, num_steps + 1):
        found[step] = (
            store.drafted(step)[-NUM_RECENT:],
            store.length_history(list("abcx"), step),
            store.last_steps(Split.TRAIN, list(PROMPTS), step),
            store.last_steps(Split.VALIDATION, ["a"], step),
            store.history_report(step),
            store.pass_rates(step - 10, step, 1.5),
        )
    for step in (1, 4, 6, 15, 16, num_steps):
        for split in Split:
            ids = store.finished_ids(split, step, range(99))
            tables = [store.rollouts(split, step), store.rewards(split, step)]
            tables += [store.shown_rollouts(split, step, 2), store.timed_rollouts(split, step)]
            tables += [store.scoring_rows(split, step)]
            lists = [table.to_pylist() for table in tables]
            found[split, step] = (ids, lists, store.plan(split, step), store.outcome(split, step))
        found["trained", step] = store.training_rows(step).to_pylist()
        origins = dict.fromkeys(keys_of(step), step)
        found["indexed", step] = store.index_rows(Split.TRAIN, origins).to_pylist()
    return found | {"all": (store.length_history(), store.history_report())}


def live_steps(store: Store) -> int:
    return store._con.execute("SELECT count(DISTINCT step) FROM rollouts").fetchall()[0][0]


@pytest.fixture
def few(monkeypatch):
    """Move steps in chunks of five."""
    monkeypatch.setattr(archive, "CHUNK_STEPS", 5)


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "whole.duckdb"
    with Store(path) as store:
        for step in range(1, NUM_STEPS + 1):
            add_step(store, step)
    return path


@pytest.fixture(scope="module")
def answers(database):
    """Return what every reader finds before any step has moved."""
    with open_read_only(database) as store:
        return told(store)


@pytest.fixture(scope="module")
def archived_run(tmp_path_factory):
    """Return a database with the same steps, of which most have moved to its archive."""
    path = tmp_path_factory.mktemp("made") / "moved.duckdb"
    with pytest.MonkeyPatch.context() as patch, Store(path) as store:
        patch.setattr(archive, "CHUNK_STEPS", 5)
        assert add_steps(store, 1, NUM_STEPS) == 3
    return path


@pytest.fixture
def moved(tmp_path, archived_run):
    copyfile(archived_run, tmp_path / "moved.duckdb")
    copytree(archived_run.with_suffix(".archive"), tmp_path / "moved.archive")
    with Store(tmp_path / "moved.duckdb") as store:
        yield store


@pytest.fixture
def whole(tmp_path, database):
    copyfile(database, tmp_path / "whole.duckdb")
    with Store(tmp_path / "whole.duckdb") as store:
        yield store


@pytest.mark.usefixtures("few")
def test_every_reader_finds_what_has_left(database, moved, answers):
    assert told(moved) == answers
    moved.close()
    with open_read_only(moved.path) as store:
        assert told(store) == answers
    found, expected = from_store(moved.path, token_ids=True), from_store(database, token_ids=True)
    assert found.table.equals(expected.table)
    assert measured_s(moved.path) == measured_s(database)


@pytest.mark.usefixtures("few")
def test_repeated_rows_are_stored_once(whole, answers):
    assert whole.archive_before(NUM_STEPS)
    names = [(row["prompt_key"], row["sample_index"]) for row in answers[Split.TRAIN, 4][1][1]]
    assert add_rollouts(whole, *[make_rollout(4, *name) for name in names]) == 0
    assert whole.add_rewards(Split.TRAIN, 4, make_rewards([(*name, 5.0) for name in names])) == 0
    assert told(whole) == answers
    # A late row is kept too. It moves with the next chunk.
    assert add_rollouts(whole, make_rollout(4, "late")) == 1
    for step in range(NUM_STEPS + 1, NUM_STEPS + 6):
        add_step(whole, step)
    assert whole.archive_before(NUM_STEPS + 5)
    assert "late" in whole.rollouts(Split.TRAIN, 4)["prompt_key"].to_pylist()


@pytest.mark.parametrize(("to", "behind"), [(0, 0), (3, 1), (11, 0), (16, 1)])
@pytest.mark.usefixtures("few")
def test_a_run_that_is_resumed_from_before_has_its_rows_back(tmp_path, moved, whole, to, behind):
    for each in (moved, whole):
        each.truncate_after(to, to, behind)
    for step in range(1, NUM_STEPS + 1):
        assert moved.rollouts(Split.TRAIN, step).equals(whole.rollouts(Split.TRAIN, step))
        assert moved.plan(Split.TRAIN, step) == whole.plan(Split.TRAIN, step)
    assert moved.length_history() == whole.length_history()
    for each in (moved, whole):
        for step in range(to + 1, NUM_STEPS + 1):
            add_step(each, step)
    assert told(moved) == told(whole)
    files = {path.name for path in (tmp_path / "moved.archive").iterdir()}
    listed = moved._con.execute("SELECT name FROM archives").fetchall()
    assert files == {name for (name,) in listed}


@pytest.mark.usefixtures("few")
def test_each_reported_step_lies_in_files_once(tmp_path):
    def files(table: str) -> list[int]:
        found = duckdb.sql(
            f"SELECT step FROM '{tmp_path}/run.archive/*/{table}*.parquet' WHERE split = 'train'"
        ).fetchall()
        return sorted(step for (step,) in found)

    with Store(tmp_path / "run.duckdb") as store:
        for step in range(1, NUM_STEPS + 1):
            add_step(store, step)
            store.write_step(step)
            store.write_step(step)
            store.archive_before(step)
        four_each = [step for step in range(1, NUM_STEPS + 1) for _ in range(4)]
        assert files("rollouts") == files("rewards") == four_each
        store.truncate_after(20, 20)
        assert files("rollouts") == files("rewards") == four_each[: 20 * 4]


KILLED = """
import os, signal, sys
from refrain.engines.store import archive
from refrain.engines.store.store import Store
archive.CHUNK_STEPS = 5
def killed(*_): os.kill(os.getpid(), signal.SIGKILL)
store, (at, step) = Store(sys.argv[1]), (sys.argv[2], int(sys.argv[3]))
if at == "first file": archive.flush = killed
if at == "files": archive.Archive.move = killed
if at == "sums": archive._sum_up = killed
if at == "rows":
    move = archive.Archive.move
    archive.Archive.move = lambda *args: move(*args) and killed()
assert store.archive_before(step)
killed()
"""


@pytest.mark.parametrize("at", ["first file", "files", "sums", "rows", "end"])
@pytest.mark.usefixtures("few")
def test_a_kill_loses_and_doubles_nothing(whole, answers, at):
    path = whole.path
    whole.close()
    command = [sys.executable, "-c", KILLED, str(path), at, str(NUM_STEPS)]
    assert subprocess.run(command, cwd=REPOSITORY, check=False).returncode == -9
    with open_read_only(path) as store:
        assert told(store) == answers
    with Store(path) as store:
        assert told(store) == answers
        assert store.archive_before(NUM_STEPS) == (at != "end")
        assert told(store) == answers
        assert live_steps(store) == archive.KEPT_STEPS


@pytest.mark.usefixtures("few")
def test_missing_files_are_reported(tmp_path, whole):
    assert whole.archive_before(NUM_STEPS)
    whole.close()
    (tmp_path / "whole.archive").rename(tmp_path / "elsewhere")
    with pytest.raises(
        ValueError, match=r"000001/rollouts.parquet is missing.*folder whole.archive"
    ):
        Store(whole.path)


def archived(path: Path) -> dict[str, Entry]:
    """Add steps until the first five have moved to the archive. Return the archive's files."""
    with Store(path) as store:
        add_steps(store, 1, archive.KEPT_STEPS + 5)
    return tree(path.with_suffix(".archive"))


@pytest.mark.usefixtures("few")
def test_a_new_database_does_not_delete_the_archive_of_another(tmp_path):
    path = tmp_path / "refrain.duckdb"
    before = archived(path)
    path.unlink()
    for open_it in (Store, open_read_only):
        with pytest.raises(ValueError, match=r"duckdb is gone, and refrain\.archive has 1 folders"):
            open_it(path)
    assert tree(path.with_suffix(".archive")) == before
    assert not path.exists()


@pytest.mark.usefixtures("few")
def test_an_older_copy_of_the_database_does_not_delete_newer_steps(tmp_path):
    path = tmp_path / "refrain.duckdb"
    with Store(path) as store:
        add_step(store, 1)
    copyfile(path, tmp_path / "copy")
    archived(path)
    last = tmp_path / "refrain.archive" / "000001"
    before = tree(last)
    copyfile(tmp_path / "copy", path)
    with open_read_only(path) as store:
        said = store.verify()
    assert [(str(last) in one, "older copy" in one) for one in said[-1:]] == [(True, True)]
    assert tree(last) == before
    Store(path).close()
    moved = tree(last.with_name("000001.unlisted"))
    assert [content for *_, content in moved.values()] == [of for *_, of in before.values()]


@pytest.mark.usefixtures("few")
def test_a_file_of_the_archive_that_was_cut_is_named(tmp_path):
    path = tmp_path / "refrain.duckdb"
    archived(path)
    file = tmp_path / "refrain.archive" / "000001" / "rewards.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"000001/rewards.parquet is damaged: .*It has old steps"):
        open_read_only(path)


def test_as_much_of_a_drafter_is_remembered_as_its_health_needs():
    assert queries.RECENT_VERSIONS >= NUM_RECENT


@pytest.mark.usefixtures("few")
def test_an_archive_from_before_passes_were_kept_is_read_on(tmp_path):
    """Its responses count as many passes as tokens, until their prompts are rolled out again."""
    path = tmp_path / "old.duckdb"
    with Store(path) as store:
        add_steps(store, 1, NUM_STEPS)
        known = store.length_history()
        store._con.execute("ALTER TABLE archived_groups DROP COLUMN passes")
    with Store(path) as store:
        found = store.length_history()
        assert {key: replace(of, tokens_per_pass=1.0) for key, of in known.items()} != known
        live = {key for key, of in found.items() if of == known[key]}
        assert live
        assert all(found[key].tokens_per_pass == 1.0 for key in known.keys() - live)
        add_steps(store, NUM_STEPS + 1, 2 * NUM_STEPS)
        with Store(tmp_path / "new.duckdb") as new:
            for step in range(1, 2 * NUM_STEPS + 1):
                add_step(new, step)
            assert store.length_history() == new.length_history()


@pytest.mark.usefixtures("few")
def test_old_steps_without_rejections_have_no_acceptance(tmp_path):
    """Later steps are read beside them. The first of these has a sample of policy version 5."""
    path = tmp_path / "run.duckdb"
    with Store(path) as store:
        add_steps(store, 1, 6)
        store._con.execute("ALTER TABLE rollouts DROP COLUMN num_rejections")
        store._con.execute("ALTER TABLE archived_drafts DROP COLUMN rejections")
    with Store(path) as store:
        assert store.drafted(7) == []
        add_steps(store, 7, 12)
        known = store.drafted(13)
        assert [version for _, version, _, _ in known] == list(range(5, 12))
        assert all(rejections > 0 for _, _, _, rejections in known)
