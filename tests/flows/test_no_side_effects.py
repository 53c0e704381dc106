"""`--check` and refused commands leave the disk as it was: names, contents, times and modes."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml
from click.testing import CliRunner
from filelock import FileLock

from refrain.engines.learn.checkpoint import CheckpointState, write_checkpoint
from refrain.engines.store.store import Store
from refrain.flows.cli import main
from refrain.schemas.profile import ProfileConfig
from refrain.tasks.run.config_record import write_config as record_config
from tests.conftest import DEMO
from tests.flows.commands import write_config
from tests.flows.directory_snapshots import tree
from tests.flows.run_dirs import make_checkpoint, make_run, report
from tests.learn.test_checkpoint import flip

SCORER = "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return a directory with a config and its scorer, an earlier run of the same name, a profile
    and a model."""
    (tmp_path / "scorer.py").write_text(SCORER)
    reward = {"type": "function", "path": str(tmp_path / "scorer.py")}
    file = write_config(tmp_path, reward=reward)
    run_dir = make_run(tmp_path / "runs", "demo", (0.5, 0.75))
    recorded = json.loads((run_dir / "config.json").read_text())
    given = yaml.safe_load(file.read_text())
    (run_dir / "config.json").write_text(json.dumps(recorded | given | {"name": "demo"}))
    make_checkpoint(run_dir, 2)
    shutil.copytree(DEMO / "model", tmp_path / "runs" / "model")
    profile = ProfileConfig(model=DEMO / "model", runs_dir=tmp_path / "runs", name="p")
    profile.run_dir.mkdir(parents=True)
    record_config(profile.run_dir, profile)
    with mock.patch.dict(os.environ):
        yield tmp_path


def refrain(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(arg) for arg in args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def unchanged(place: Path, *args: object) -> tuple[int, str]:
    before = tree(place)
    outcome = refrain(*args)
    assert tree(place) == before, outcome[1]
    return outcome


def test_check_changes_nothing(place: Path) -> None:
    config = place / "train.yaml"
    for args in (["name=new"], ["--overwrite"]):
        code, said = unchanged(place, "train", config, *args, "--check")
        assert (code, "All is well" in said) == (0, True), said


def test_check_of_a_run_that_was_killed_changes_nothing(place: Path) -> None:
    """Its store has a write-ahead log. Opening the store would replay it and change the file."""
    run_dir = place / "runs" / "demo"
    with Store(place / "open.duckdb") as store:
        for step in (1, 2):
            store.add_step(report(step, 0.5))
        for suffix in ("", ".wal"):
            shutil.copy(place / f"open.duckdb{suffix}", run_dir / f"refrain.duckdb{suffix}")
    code, said = unchanged(place, "train", "--resume", run_dir, "--check")
    assert (code, "All is well" in said) == (0, True), said
    (run_dir / "steps.jsonl").write_text("{}\n")
    code, said = unchanged(place, "train", "--resume", run_dir, "--check")
    assert (code, "steps.jsonl line 1 is damaged" in said.replace("\n", "")) == (0, True), said


def test_damaged_models_of_checkpoints_are_refused(place: Path) -> None:
    """Evaluations, new runs and profiles refuse them."""

    def copy_model(path: Path) -> None:
        shutil.copytree(DEMO / "model", path / "model")

    shutil.rmtree(place / "runs" / "demo" / "checkpoints")
    state = CheckpointState(step=2, policy_version=2, loader_state={})
    path = write_checkpoint(place / "runs" / "demo" / "checkpoints", state, copy_model)
    file = path / "model" / "model.safetensors"
    # Flip the lowest bit of a weight: no check of its value would notice.
    flip(file, 8 * (file.stat().st_size - 4))
    model = f"model.path={path / 'model'}"
    for args in (
        ("evaluate", "demo", "--runs-dir", place / "runs"),
        ("evaluate", path, "--runs-dir", place / "runs"),
        ("train", place / "train.yaml", "name=new", model, "--check"),
        ("profile", "--model", path / "model", "--runs-dir", place / "runs"),
    ):
        code, said = unchanged(place, *args)
        assert (code, f"{file} is damaged: its SHA-256" in said) == (2, True), said


def linked(place: Path) -> None:
    (place / "runs" / "demo").rename(place / "elsewhere")
    (place / "runs" / "demo").symlink_to(place / "elsewhere")


def file_there(place: Path) -> None:
    shutil.rmtree(place / "runs" / "demo")
    (place / "runs" / "demo").write_text("thesis")


def model_there(place: Path) -> None:
    shutil.rmtree(place / "runs" / "demo")
    (place / "runs" / "model").rename(place / "runs" / "demo")


def profile_there(place: Path) -> None:
    shutil.rmtree(place / "runs" / "demo")
    (place / "runs" / "profiles" / "p").rename(place / "runs" / "demo")


def no_config(place: Path) -> None:
    (place / "runs" / "demo" / "config.json").unlink()


def other_config(place: Path) -> None:
    (place / "runs" / "demo" / "config.json").write_text("{")


def nothing(_: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (linked, "is a link to"),
        (file_there, "is not a directory"),
        (model_there, "is not the config of a run"),
        (profile_there, "is not the config of a run"),
        (no_config, "is not a run's directory"),
        (other_config, "config.json is not valid JSON"),
    ],
)
def test_overwrite_deletes_only_runs(place: Path, there: Callable[[Path], None], said: str) -> None:
    there(place)
    code, output = unchanged(place, "train", place / "train.yaml", "--overwrite")
    assert (code, said in output) == (2, True), output


def test_overwrite_deletes_no_live_run(place: Path) -> None:
    lock = FileLock(place / "runs" / "demo" / ".lock")
    with lock:
        for args in (["--overwrite"], ["--overwrite", "--check"]):
            code, said = unchanged(place, "train", place / "train.yaml", *args)
            assert (code, "is used by a live run" in said) == (2, True), said


REFUSED = [
    ("train {0}/train.yaml", "there is a run in"),
    ("train {0}/train.yaml --overwrite seed=-1", "seed"),
    ("train {0}/train.yaml --overwrite model.path={0}/nowhere", "nowhere"),
    ("train {0}/train.yaml name=new data.train=[{0}/nowhere]", "nowhere"),
    ("train {0}/train.yaml name=new reward.function=missing", "missing"),
    ("train --resume {0}/nowhere", "no run in"),
    ("train --resume {0}/runs/demo seed=7", "seed: 0 -> 7"),
    ("train --resume {0}/runs/demo --check", "refrain.duckdb is gone"),
    ("train --resume {0}/runs/demo", "refrain.duckdb is gone"),
    ("train {0}/train.yaml --new-store name=new", "give --resume"),
    ("evaluate {0}/runs/nowhere --runs-dir {0}/runs", "nowhere"),
    ("evaluate demo {0}/nowhere.parquet --runs-dir {0}/runs", "model has no config.json"),
    ("evaluate {0}/runs/model {0}/nowhere.parquet --runs-dir {0}/runs", "context of 1024 tokens"),
    ("profile --model {0}/nowhere --runs-dir {0}/runs", "nowhere"),
    ("profile --model {0}/runs/model --runs-dir {0}/runs --max-context 99999999", "max_context"),
    ("profile --model {0}/runs/model --runs-dir {0} --name p --overwrite", "not a run's"),
    ("data {0}/nowhere.parquet", "nowhere.parquet is neither a file"),
    ("data {0}/train.parquet --out {0}", "exists already"),
    ("data {0}/train.yaml --out {0}/new", "train.yaml"),
]


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_a_refusal_changes_nothing(place: Path, line: str, said: str) -> None:
    (place / "profiles" / "p").mkdir(parents=True)
    (place / "profiles" / "p" / "thesis.tex").touch()
    code, output = unchanged(place, *line.format(place).split())
    assert code == 2, output
    assert said in output
