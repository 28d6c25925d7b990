"""Make consoles, tables, numbers and progress bars for the commands. Rich is imported when one of them is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FIRST = 40  # characters that the first column of a table keeps; below them its words wrap
PLAIN_SECONDS = 10.0  # between lines where there is no terminal to draw a bar on

Advance = Callable[[float, str], None]


def number(value: float) -> str:
    """Return a number as text, with two or three significant digits, or as an integer at 1,000 and above."""
    if value and abs(value) < 0.1:
        return f"{value:.2g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"


def console(**options: Any) -> Console:
    """Return a console that prints text as it is: brackets in a path are no markup."""
    from rich.console import Console

    class Printer(Console):
        def on_broken_pipe(self) -> None:
            """Leave the error to the command's `main`; rich would exit with code 1."""
            raise BrokenPipeError

    return Printer(markup=False, highlight=False, **options)


def show(table: Table) -> None:
    """Print a table without cutting any column but the first, even if it is then wider than the terminal."""
    from rich.cells import cell_len

    widths = [
        max((cell_len(line) for cell in (column.header, *column.cells) for line in str(cell).splitlines()), default=0)
        for column in table.columns
    ]
    printer = console()
    printer.width = max(printer.width, min(widths[0], FIRST) + sum(widths[1:]) + 3 * len(widths) + 1)
    printer.print(table)


@contextmanager
def progress(console: Console, label: str, total: float) -> Iterator[Advance]:
    """Show a progress bar with elapsed and expected time; without a terminal, print a line now and then and at the end.

    The function that it yields takes what is done since its last call, in the unit of `total`, and what to show.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    begin = printed = time.perf_counter()
    done, last = 0.0, ""

    def tell(words: str) -> None:
        console.print(f"{label}: {last}, {time.perf_counter() - begin:.0f} s{words}", soft_wrap=True)
        console.file.flush()

    with Progress(
        *columns, TextColumn("{task.fields[shown]}"), console=console, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(label, total=total, shown="")

        def advance(by: float, shown: str) -> None:
            nonlocal done, last, printed
            done, last = done + by, shown
            bar.update(task, advance=by, shown=shown)
            now = time.perf_counter()
            if not console.is_terminal and now - printed > PLAIN_SECONDS:
                printed = now
                left = max(0.0, (now - begin) * (total / done - 1)) if done else 0.0
                tell(f", at most {left:.0f} s left")

        yield advance
    if last and not console.is_terminal:
        tell("")
