"""How the demo looks, on a terminal and anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import ROUNDED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from cli.output import line

_WIDE = 160  # columns, off a terminal


class Stage:
    """Where the demo shows what it does."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._acts = 0

    @property
    def on_terminal(self) -> bool:
        """Whether a person watches."""
        return self._console.is_terminal

    def act(self, title: str) -> None:
        """Begin the next part."""
        self._acts += 1
        if self.on_terminal:
            self._console.print()
            self._console.rule(Text(f"{self._acts}. {title}", style="bold cyan"), align="left", style="dim")
        else:
            self._plain(f"\n{self._acts}. {title}")

    def say(self, text: str, style: str = "") -> None:
        """Say one thing that happened."""
        if self.on_terminal:
            self._console.print(Text(f"   {text}", style=style))
        else:
            self._plain(f"   {text}")

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how far something is; call what is yielded with the number done."""
        if not self.on_terminal:
            yield lambda _done: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)

    def table(self, columns: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> None:
        """Show the result: each row's cells, and whether it holds."""
        table = Table(*columns, header_style="bold", box=ROUNDED if self.on_terminal else None, pad_edge=False)
        for column in table.columns[2:]:
            column.justify = "right"
        for cells, holds in rows:
            table.add_row(*cells, Text("yes", style="bold green") if holds else Text("NO", style="bold red"))
        console = self._console if self.on_terminal else Console(width=_WIDE, no_color=True)
        console.print(table)

    def _plain(self, text: str) -> None:
        line(text)
        sys.stdout.flush()
