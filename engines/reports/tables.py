"""Style of all terminal tables: no frame, numbers to the right and never wrapped."""

from collections.abc import Collection

from rich.table import Table


def plain_table(
    *columns: str,
    text: Collection[str] = (),
    gap: int = 2,
    min_width: int | None = None,
    header: bool = True,
) -> Table:
    """Return a table without rows.

    Args:
        text: Columns that hold words. They wrap when the terminal is narrow.
        gap: Number of spaces between two columns.
        min_width: Least width of a column of words, in characters.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=header)
    for column in columns:
        if column in text:
            table.add_column(column, overflow="fold", min_width=min_width)
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def printable(text: str, *, lines: bool = False) -> str:
    """Escape control characters, which could command the terminal (for example ``\\x1b[2J``). With
    `lines`, keep line feeds and tabs."""
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        one if one.isprintable() or one in kept else one.encode("unicode_escape").decode()
        for one in text
    )
