"""Consoles and tables of the commands. Rich is imported when one of them is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FIRST = 40  # characters that the first column of a table keeps; below them its words wrap


def console(**options: Any) -> Console:
    """Return a console that prints text as it is: brackets in a path are no markup."""
    from rich.console import Console

    return Console(markup=False, highlight=False, **options)


def show(table: Table) -> None:
    """Print a table whose columns, apart from the first, are never cut: it is wider than the terminal if need be."""
    from rich.cells import cell_len

    widths = [
        max((cell_len(line) for cell in (column.header, *column.cells) for line in str(cell).splitlines()), default=0)
        for column in table.columns
    ]
    printer = console()
    printer.width = max(printer.width, min(widths[0], FIRST) + sum(widths[1:]) + 3 * len(widths) + 1)
    printer.print(table)
