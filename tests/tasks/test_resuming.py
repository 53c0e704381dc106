"""The checkpoint and files from which a run resumes when parts of it are lost or damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner

from refrain.engines.learn.mirror import Mirror
from refrain.engines.store.rows import rollout_rows
from refrain.engines.store.store import Store, open_read_only
from refrain.engines.tracking.progress_file import STEPS_FILE, ProgressFile, readable_steps
from refrain.flows.cli import main
from refrain.schemas.config import TrainConfig
from refrain.schemas.rollout import Split
from refrain.tasks.run.record import read_run
from refrain.tasks.run.resuming import check_resumable, renew_store, take_up
from refrain.tasks.run.run_dir import claim_run_dir
from tests.flows.directory_snapshots import tree
from tests.flows.run_dirs import report
from tests.learn.test_checkpoint import flip, write
from tests.store.test_store import make_rollout
from tests.tasks.test_run_dir import config

NUM_STEPS = 3


@pytest.fixture
def run(tmp_path: Path) -> TrainConfig:
    """Return a run of three steps, with checkpoints of the second and the third."""
    given = config(tmp_path)
    claim_run_dir(given, resume=False).release()
    steps = [report(step, 0.5) for step in range(1, NUM_STEPS + 1)]
    with Store(given.run_dir / "refrain.duckdb") as store, ProgressFile(given.run_dir, 4) as file:
        for step in steps:
            store.add_rollouts(rollout_rows([make_rollout(step.step)]), 0)
            store.add_step(step)
            file.step(step, 4)
    for step in (2, 3):
        write(given.run_dir / "checkpoints", step)
    return given


def steps_of(run: TrainConfig) -> list[int]:
    reports, _ = readable_steps(run.run_dir)
    return [one.step for one in reports]


def test_complete_run_resumes_from_its_last_checkpoint(run: TrainConfig) -> None:
    before = tree(run.run_dir)
    found = check_resumable(run)
    assert found.checkpoint == run.run_dir / "checkpoints" / "global_step_3"
    assert (found.damaged, found.notes) == ({}, ())
    take_up(run, found)
    assert tree(run.run_dir) == before


def gone(name: str) -> Callable[[Path], None]:
    def remove(run_dir: Path) -> None:
        place = run_dir / name
        shutil.rmtree(place) if place.is_dir() else place.unlink()

    remove.__name__ = f"{name} gone"
    return remove


def cut(name: str) -> Callable[[Path], None]:
    def cut_off(run_dir: Path) -> None:
        content = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(content[: len(content) // 2])

    cut_off.__name__ = f"{name} cut"
    return cut_off


def flipped(run_dir: Path) -> None:
    for step in (2, 3):
        flip(run_dir / "checkpoints" / f"global_step_{step}" / "model" / "file", 5)


def emptied(run_dir: Path) -> None:
    (run_dir / "refrain.duckdb").write_bytes(b"")


def archive_alone(run_dir: Path) -> None:
    (run_dir / "refrain.duckdb").unlink()
    (run_dir / "refrain.archive" / "000001").mkdir(parents=True)


def archive_gone(run_dir: Path) -> None:
    with Store(run_dir / "refrain.duckdb") as store:
        store._con.execute("INSERT INTO archives VALUES ('000001', 1, 1, 1, 1)")


def changes(run_dir: Path) -> None:
    (run_dir / "changes.jsonl").write_text('{"name": "seed"}\n')


def crashes(run_dir: Path) -> None:
    (run_dir / "crashes.jsonl").write_bytes(b"\xff\n")


def mlflow(run_dir: Path) -> None:
    (run_dir / "mlflow.json").write_text("[]")


REFUSED = [
    (gone("checkpoints"), "reported 3 steps, but no checkpoint .*there is none"),
    (flipped, "no checkpoint .*step_3/model/file is damaged.*step_2/model/file is damaged"),
    (gone("refrain.duckdb"), r"refrain.duckdb is gone.*--new-store"),
    (cut("refrain.duckdb"), r"refrain.duckdb cannot be .*--new-store"),
    (emptied, r"refrain.duckdb is not a refrain store.*--new-store"),
    (archive_alone, r"refrain.duckdb is gone.*--new-store"),
    (archive_gone, r"000001/rollouts.parquet is missing"),
    (changes, r"changes.jsonl line 1 is damaged"),
    (crashes, r"crashes.jsonl line 1 is damaged"),
    (mlflow, r"mlflow.json is damaged: delete it"),
]


@pytest.mark.parametrize(("damage", "said"), REFUSED, ids=[one.__name__ for one, _ in REFUSED])
def test_damaged_runs_are_refused_before_any_change(
    run: TrainConfig, damage: Callable[[Path], None], said: str
) -> None:
    damage(run.run_dir)
    before = tree(run.run_dir)
    with pytest.raises(ValueError, match=f"(?s){said}"):
        check_resumable(run)
    assert tree(run.run_dir) == before
    read_run(run.run_dir)


@pytest.mark.parametrize("damage", [cut, None])
def test_a_damaged_checkpoint_is_kept_and_the_one_before_it_used(
    run: TrainConfig, damage: Callable | None
) -> None:
    name = "checkpoints/global_step_3/model/file"
    if damage:
        damage(name)(run.run_dir)
    else:
        flip(run.run_dir / name, 5)
    found = check_resumable(run)
    assert found.checkpoint == run.run_dir / "checkpoints" / "global_step_2"
    assert "global_step_3 is not used: " in found.notes[0]
    assert name in found.notes[0]
    content = (run.run_dir / name).read_bytes()
    take_up(run, found)
    kept = run.run_dir / "checkpoints" / "global_step_3.damaged" / "model" / "file"
    assert kept.read_bytes() == content
    assert check_resumable(run).notes == ()


def test_a_copy_elsewhere_is_as_good_as_a_checkpoint(run: TrainConfig, tmp_path: Path) -> None:
    url = (tmp_path / "copies").as_uri()
    trainer = run.trainer.model_copy(
        update={
            "checkpoint_url": TrainConfig.model_validate(
                run.model_dump() | {"trainer": {"checkpoint_url": url}}
            ).trainer.checkpoint_url
        }
    )
    Mirror(url, "it").put(run.run_dir / "checkpoints" / "global_step_3", keep=1)
    shutil.rmtree(run.run_dir / "checkpoints")
    found = check_resumable(run.model_copy(update={"trainer": trainer}))
    assert (found.checkpoint, found.notes) == (None, ())


def torn(line: bytes) -> bytes:
    return line[:40]


def noise(line: bytes) -> bytes:
    return b"\xff\xfe\x00" + line


def other(_: bytes) -> bytes:
    return b'{"step": 2}'


@pytest.mark.parametrize("damage", [torn, noise, other])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_damaged_line_of_steps_comes_back_from_the_store(
    run: TrainConfig, damage: Callable[[bytes], bytes], number: int
) -> None:
    file = run.run_dir / STEPS_FILE
    whole = file.read_bytes()
    lines = whole.split(b"\n")
    lines[number] = damage(lines[number])
    file.write_bytes(b"\n".join(lines))
    _, (wrong,) = readable_steps(run.run_dir)
    assert f"steps.jsonl line {number + 1} is damaged (" in wrong
    record = read_run(run.run_dir)
    assert len(record.steps) == NUM_STEPS - 1
    assert f"line {number + 1} is damaged" in record.read_errors[0]
    found = check_resumable(run)
    assert f"line {number + 1} is damaged" in found.notes[0]
    take_up(run, found)
    assert file.read_bytes() == whole
    assert file.with_name("steps.jsonl.damaged").exists()


def test_a_line_that_a_crash_cut_is_no_damage(run: TrainConfig) -> None:
    file = run.run_dir / STEPS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    found = check_resumable(run)
    assert found.notes == ()
    take_up(run, found)
    assert steps_of(run) == [1, 2, 3]
    assert not file.with_name("steps.jsonl.damaged").exists()


def test_an_empty_store_takes_the_place_of_a_lost_one(run: TrainConfig) -> None:
    """The damaged store is kept under another name, and the reports of steps survive."""
    cut("refrain.duckdb")(run.run_dir)
    (run.run_dir / "refrain.archive" / "000001").mkdir(parents=True)
    damaged = (run.run_dir / "refrain.duckdb").read_bytes()
    assert check_resumable(run, new_store=True).checkpoint
    moved = renew_store(run.run_dir)
    names = ["refrain.duckdb.damaged", "refrain.archive.damaged"]
    assert [path.name for path in moved] == names
    assert moved[0].read_bytes() == damaged
    found = check_resumable(run)
    take_up(run, found)
    assert steps_of(run) == [1, 2, 3]
    with open_read_only(run.run_dir / "refrain.duckdb") as store:
        assert [one.step for one in store.steps()] == [1, 2, 3]


def test_older_copy_of_the_store_is_reported(run: TrainConfig) -> None:
    with Store(run.run_dir / "refrain.duckdb") as store:
        store._con.execute("DELETE FROM steps WHERE step >= 2")
    with pytest.raises(ValueError, match=r"refrain.duckdb lacks step 2, which steps.jsonl has"):
        check_resumable(run)
    assert renew_store(run.run_dir) == []
    assert check_resumable(run).notes == ()
    with open_read_only(run.run_dir / "refrain.duckdb") as store:
        assert store.rollouts(Split.TRAIN, 1).num_rows == 1
        assert [one.step for one in store.steps()] == [1, 2, 3]


def test_steps_that_the_store_forgot_to_do_them_again_are_not_lost(run: TrainConfig) -> None:
    """This happens when a run is killed just after it went back to its checkpoint."""
    shutil.rmtree(run.run_dir / "checkpoints" / "global_step_3")
    with Store(run.run_dir / "refrain.duckdb") as store:
        store.truncate_after(2, 2)
    assert check_resumable(run).checkpoint == run.run_dir / "checkpoints" / "global_step_2"


def test_store_without_its_log_is_reported(run: TrainConfig) -> None:
    path = run.run_dir / "refrain.duckdb"
    path.unlink()
    duckdb.connect(str(path)).close()
    with pytest.raises(
        ValueError, match=r"has no tables: it was copied without refrain.duckdb.wal"
    ):
        check_resumable(run)


def test_a_run_that_has_not_begun_has_nothing_to_lose(tmp_path: Path) -> None:
    given = config(tmp_path)
    claim_run_dir(given, resume=False).release()
    found = check_resumable(given)
    assert (found.checkpoint, found.notes) == (None, ())
    take_up(given, found)
    Store(given.run_dir / "refrain.duckdb").close()
    assert check_resumable(given).checkpoint is None


def test_run_that_saves_rarely_does_not_restart(run: TrainConfig) -> None:
    shutil.rmtree(run.run_dir / "checkpoints")
    trainer = run.trainer.model_copy(update={"save_every_steps": 100})
    rarely = run.model_copy(update={"trainer": trainer})
    claim_run_dir(rarely, resume=True).release()
    with pytest.raises(ValueError, match=r"reported 3 steps.*there is none"):
        check_resumable(rarely)


@pytest.mark.parametrize("name", ["progress.json", "summary.json", "changes.jsonl", "mlflow.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00", b'{"a": 1}'])
def test_damaged_records_are_reported_and_hide_nothing(
    run: TrainConfig, name: str, content: bytes
) -> None:
    (run.run_dir / name).write_bytes(content)
    runs_dir = str(run.runs_dir)
    for args in (["show", "it", "--runs-dir", runs_dir], ["runs", "--runs-dir", runs_dir]):
        done = CliRunner().invoke(main, args)
        assert done.exit_code == 0, done.output
        assert (
            f"{name} is damaged" in (told := done.output.replace("\n", ""))
            or f"{name} line 1 is damaged" in told
            or (content == b"" and name == "changes.jsonl")
        ), done.output
