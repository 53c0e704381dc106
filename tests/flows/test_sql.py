"""`refrain sql` on a run that has ended."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.store.store import Store
from flows.cli import main
from tasks.run.run_dir import CONFIG_FILE, STORE_FILE
from tests.store.test_archive import add_step

QUERY = "SELECT step, count(*) AS num FROM plans GROUP BY step ORDER BY step"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "mine"
    directory.mkdir()
    (directory / CONFIG_FILE).write_text("{}")
    with Store(directory / STORE_FILE) as store:
        for step in (1, 2):
            add_step(store, step)
    return directory


def test_its_answer_is_a_table_or_csv(run_dir: Path) -> None:
    table = CliRunner().invoke(main, ["sql", str(run_dir), QUERY])
    assert [line.split() for line in table.output.splitlines()] == [
        ["step", "num"],
        ["1", "1"],
        ["2", "1"],
    ]
    file = run_dir / "answer.csv"
    assert CliRunner().invoke(main, ["sql", str(run_dir), QUERY, "--csv", str(file)]).exit_code == 0
    assert file.read_text().split() == ["step,num", "1,1", "2,1"]


@pytest.mark.parametrize(
    ("run", "arguments", "said"),
    [
        ("mine", ["DROP TABLE plans"], "one query that reads"),
        ("mine", [QUERY, "--csv", "nowhere/answer.csv"], "--csv nowhere/answer.csv: there is no"),
        ("other", [QUERY], "other"),
    ],
)
def test_what_is_wrong_is_refused(run_dir: Path, run: str, arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["sql", str(run_dir.parent / run), *arguments])
    assert result.exit_code == 2
    assert said in result.output
