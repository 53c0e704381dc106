"""`refrain sql`: query a run's store, during training or afterwards."""

import csv
import sys
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from refrain.engines.reports.tables import plain_table, printable
from refrain.flows.output_file import CSV, check_output, writing
from refrain.tasks.run.find import find_run
from refrain.tasks.run.store_query import query_run

MAX_SHOWN = 100
_MAX_WIDTH = 60
_DIGITS = 4


def launch_sql(
    run: str, query: str, runs_dir: Path, timeout_s: float, csv_file: str | None
) -> None:
    """Run a query and print or write its rows. Raise ValueError when there is no such run, the file
    cannot be written, or the store refuses the query."""
    check_output(csv_file, CSV, "--csv")
    run_dir = find_run(run, runs_dir)
    table = query_run(run_dir, query, timeout_s)
    _check_dates(table)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if csv_file == "-":
        _write_csv(table, _Terminal() if sys.stdout.isatty() else sys.stdout)
    elif csv_file:
        with (
            writing(csv_file) as unfinished,
            unfinished.open("w", newline="", encoding="utf-8") as file,
        ):
            _write_csv(table, file)
    else:
        _show(table)


def _check_dates(table: pa.Table) -> None:
    """Raise ValueError for a date outside Python's range, before anything is written."""
    for field, column in zip(table.schema, table.columns, strict=True):
        if "date" in str(field.type) or "timestamp" in str(field.type):
            try:
                column.to_pylist()
            except (OverflowError, ValueError) as error:
                raise ValueError(
                    f"the column {printable(field.name)} has a date that cannot be shown "
                    f"({error}): convert it to text, for example column::VARCHAR"
                ) from error


class _Terminal:
    """Standard output without control sequences, which a terminal would carry out."""

    def write(self, text: str) -> None:
        sys.stdout.write(printable(text.replace("\r\n", "\n"), lines=True))


def _write_csv(table: pa.Table, file: Any) -> None:
    writer = csv.writer(file)
    writer.writerow(table.column_names)
    for batch in table.to_batches():
        writer.writerows(_rows(batch))


def _rows(table: pa.Table | pa.RecordBatch) -> Iterator[tuple[Any, ...]]:
    """Yield each row's values by position, because two columns may have the same name."""
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def _show(table: pa.Table) -> None:
    numeric = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    words = [f.name for f in table.schema if not any(is_one(f.type) for is_one in numeric)]
    shown = plain_table(*map(_cell, table.column_names), text=[*map(_cell, words)])
    for row in _rows(table.slice(0, MAX_SHOWN)):
        shown.add_row(*map(_cell, row))
    console = Console(highlight=False, markup=False)
    console.print(shown)
    if table.num_rows > MAX_SHOWN:
        console.print(f"the first {MAX_SHOWN} of {table.num_rows:,} rows; --csv FILE has all")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.{_DIGITS}g}"
    text = "" if value is None else str(value)
    text = printable(text[: _MAX_WIDTH + 1])
    return text if len(text) <= _MAX_WIDTH else text[: _MAX_WIDTH - 2] + ".."
