"""One table for all simulations of the papers."""

from collections.abc import Iterable, Mapping

from rich.console import Console

from refrain.engines.reports.simulation import Cell
from refrain.engines.reports.tables import plain_table

PAPER = "paper"
"""Key of what the paper prints."""


def show_rows(
    title: str, rows: Iterable[Mapping[str, Cell]], columns: Mapping[str, str], console: Console
) -> None:
    """Print rows. `columns` has a format for each key. The first column names the row."""
    console.print(f"SIMULATION {title}")
    first, *others = columns
    headers = [name.replace("_", "\n") for name in others]
    table = plain_table(first, *headers, text=(first,), gap=1, min_width=16)
    for row in rows:
        table.add_row(*(f"{row[name]:{columns[name]}}" if name in row else "" for name in columns))
    console.print(table)
