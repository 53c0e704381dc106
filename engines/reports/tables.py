"""Tables in a terminal, all alike: without a frame, numbers whole and to the right."""

from collections.abc import Collection

from rich.table import Table


def plain_table(
    *columns: str,
    text: Collection[str] = (),
    gap: int = 2,
    min_width: int | None = None,
    header: bool = True,
) -> Table:
    """A table without rows.

    Args:
        text: Columns that hold words; where room is short they fold.
        gap: Spaces between two columns.
        min_width: Characters that a column of words has at least.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=header)
    for column in columns:
        if column in text:
            table.add_column(column, overflow="fold", min_width=min_width)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def printable(text: str, *, lines: bool = False) -> str:
    """The text with escapes in place of characters that a terminal could obey, as in ``\\x1b[2J``.
    With `lines`, line feeds and tabs stay."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode()
        for one in text
    )
