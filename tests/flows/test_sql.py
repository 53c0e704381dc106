"""`refrain sql` on a finished run."""

import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from click.testing import CliRunner

from refrain.engines.store.store import Store
from refrain.flows.cli import main
from refrain.flows.command import run_command
from refrain.flows.sql import launch_sql
from refrain.tasks.run.run_dir import CONFIG_FILE, STORE_FILE
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


def test_sql_answers_with_a_table_or_csv(run_dir: Path) -> None:
    table = CliRunner().invoke(main, ["sql", str(run_dir), QUERY])
    assert [line.split() for line in table.output.splitlines()] == [
        ["step", "num"],
        ["1", "1"],
        ["2", "1"],
    ]
    file = run_dir / "answer.csv"
    assert CliRunner().invoke(main, ["sql", str(run_dir), QUERY, "--csv", str(file)]).exit_code == 0
    assert file.read_text().split() == ["step,num", "1,1", "2,1"]


def test_two_columns_of_one_name_are_both_shown(run_dir: Path) -> None:
    query = (
        "SELECT a.step, b.step, a.num_samples, b.num_samples FROM lengths a JOIN lengths b "
        "ON b.step = a.step + 1 WHERE a.num_samples < b.num_samples ORDER BY a.step"
    )
    file = run_dir / "answer.csv"
    shown = CliRunner().invoke(main, ["sql", str(run_dir), query]).output.splitlines()
    CliRunner().invoke(main, ["sql", str(run_dir), query, "--csv", str(file)])
    written = file.read_text().splitlines()
    names = ["step", "step", "num_samples", "num_samples"]
    assert [row.split() for row in shown[:2]] == [names, ["1", "2", "1", "2"]]
    assert written[:2] == [",".join(names), "1,2,1,2"]


def test_control_characters_in_data_are_escaped(run_dir: Path) -> None:
    """The data has escape sequences, right-to-left text, line breaks and a cell of 10 MB."""
    query = (
        "SELECT chr(27) || '[2J' || chr(8238) || chr(10) || 'é' AS \"\x1b[31mred\", "
        "repeat('x', 10000000) AS long, [chr(7)] AS list"
    )
    wide = CliRunner(env={"COLUMNS": "200"})
    header, row = wide.invoke(main, ["sql", str(run_dir), query]).output.splitlines()
    assert header.split() == ["\\x1b[31mred", "long", "list"]
    assert row.split() == ["\\x1b[2J\\u202e\\né", "x" * 58 + "..", "['\\x07']"]
    csv = CliRunner().invoke(main, ["sql", str(run_dir), query, "--csv", "-"]).output
    assert csv.startswith("\x1b[31mred,long,list"), "the CSV differs from the data"


class Terminal(TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_csv_on_a_terminal_is_escaped_too(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal(shown := BytesIO(), encoding="utf-8"))
    launch_sql(str(run_dir), "SELECT chr(27) || '[2J' AS a, 'é' AS b", run_dir, 60.0, "-")
    sys.stdout.flush()
    assert shown.getvalue().decode() == "a,b\n\\x1b[2J,é\n"


def test_a_terminal_that_cannot_show_a_letter_shows_its_number(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(shown := BytesIO(), encoding="ascii"))
    run_command(lambda: launch_sql(str(run_dir), "SELECT '€'", run_dir, 60.0, None))
    assert b"\\u20ac" in shown.getvalue()


@pytest.mark.parametrize(
    ("run", "arguments", "said"),
    [
        ("mine", ["DROP TABLE plans"], "one query that reads"),
        ("mine", [QUERY, "--csv", "nowhere/answer.csv"], "--csv nowhere/answer.csv: there is no"),
        ("other", [QUERY], "other"),
        ("mine", [QUERY, "--timeout", "nan"], "'nan' is not a finite number"),
        ("mine", [QUERY, "--timeout", "1e30"], "is not in the range"),
        ("mine", ["SELECT '\udcff'"], "not UTF-8"),
        ("mine", ["SELECT 'infinity'::TIMESTAMP AS never"], "the column never has a date that"),
        ("mine", ["SELECT ['290000-01-01'::DATE] AS late"], "late has a date that cannot be shown"),
    ],
)
def test_invalid_queries_are_refused(
    run_dir: Path, run: str, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(main, ["sql", str(run_dir.parent / run), *arguments])
    assert result.exit_code == 2
    assert said in result.output
