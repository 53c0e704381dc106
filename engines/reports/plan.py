"""Print the memory plan of a run as a table in the terminal."""

from collections.abc import Sequence

from rich.console import Console

from refrain.engines.machine.plan import Need
from refrain.engines.reports.tables import plain_table


def print_needs(needs: Sequence[Need]) -> None:
    """Print a row per need. Print nothing if no needs are known."""
    if not needs:
        return
    table = plain_table("memory", "takes GB", "of GB", "for", text=("memory", "for"))
    for need in needs:
        usable = "" if need.usable_bytes is None else f"{need.usable_bytes / 1e9:.1f}"
        table.add_row(need.place, f"{need.bytes / 1e9:.1f}", usable, need.parts)
    Console(highlight=False).print(table)
