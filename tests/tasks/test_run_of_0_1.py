"""A run that refrain 0.1.0 stored: its config and its steps are read, the rest is refused.

`run_0_1` has files as 0.1.0 wrote them, its store as SQL.
"""

import shutil
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner, Result

from refrain.flows.cli import main
from refrain.schemas.config import TrainConfig
from refrain.tasks.run.record import read_run
from refrain.tasks.run.resuming import check_resumable, renew_store
from refrain.tasks.run.run_dir import read_config
from tests.flows.directory_snapshots import tree

FILES = Path(__file__).parent / "run_0_1"
STATE = '{"step": 2, "policy_version": 2, "loader_state": {}, "file_bytes": {}}'
"""The state file of a checkpoint."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run_dir = tmp_path / "runs" / "old"
    shutil.copytree(FILES, run_dir, ignore=shutil.ignore_patterns("*.sql"))
    with duckdb.connect(run_dir / "refrain.duckdb") as con:
        con.execute((FILES / "store.sql").read_text())
    checkpoint = run_dir / "checkpoints" / "global_step_2"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(STATE)
    return run_dir


def refrain(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)], env={"COLUMNS": "200"})


def test_its_config_and_steps_are_read(run: Path) -> None:
    record = read_run(run)
    assert isinstance(record.config, TrainConfig)
    assert (record.config.staleness, record.config.rollout.placement) == (0, "histopipe")
    assert [step.step for step in record.steps] == [1, 2]
    assert record.read_errors == ()
    shown = refrain("show", run)
    assert shown.exit_code == 0, shown.output
    assert "2/2" in shown.output


def test_its_store_is_refused_as_one_of_another_version(run: Path) -> None:
    before = tree(run)
    refused = refrain("samples", run)
    assert refused.exit_code == 2
    assert "has schema version 4, but this refrain reads version" in refused.output
    with pytest.raises(ValueError, match="Open it with the release that wrote it"):
        check_resumable(read_config(run))
    assert tree(run) == before


def test_a_new_store_does_not_help(run: Path) -> None:
    """Its checkpoints are refused. Without any, its store is, and stays where it is."""
    with pytest.raises(ValueError, match=r"refrain 0\.1 wrote it.* as model\.path"):
        check_resumable(read_config(run), new_store=True)
    with pytest.raises(ValueError, match="has schema version 4"):
        renew_store(run)
    assert (run / "refrain.duckdb").exists()
