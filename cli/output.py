"""What the command line prints: JSON lines for programs, tables for people, and questions only on a terminal.

On a terminal a table has colours (unless `NO_COLOR` is set); in a pipe it is plain and never cut to a width.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TextIO, TypeVar

from cli.exits import printable
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom.chassis.exits import Finding

T = TypeVar("T")

_BRANCH: Final = ("├─ ", "│  ")  # before an item of a tree, before what grows out of it
_LAST: Final = ("└─ ", "   ")
_WIDE: Final = 10_000  # columns of a table that nobody looks at on a screen
_STYLES: Final = {
    "done": "green",
    "dead": "bold red",
    "aborted": "dim",
    "inflight": "cyan",
    "pending": "yellow",
    "ok": "green",
    "failed": "bold red",
}


def json_line(value: Any, stream: TextIO | None = None, *, flush: bool = False) -> None:
    """Write one JSON object as a line, to standard output where no stream is named; with `flush` it is seen at once."""
    import msgspec  # noqa: PLC0415

    print(msgspec.json.encode(value, enc_hook=str).decode(), file=stream or sys.stdout, flush=flush)


def line(text: str, *, flush: bool = False) -> None:
    """Write one line for people; whatever could steer a terminal is escaped. With `flush` it is seen at once."""
    print(printable(text), flush=flush)  # noqa: T201


def note(text: str) -> None:
    """Say something beside the output: on standard error."""
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; a cell is text, a number, a time, or None for nothing."""
    if not sys.stdout.isatty():  # Rich would take minutes for the rows of a large outbox
        from rich.cells import cell_len  # noqa: PLC0415

        texts = [columns, *(list(map(_text, row)) for row in rows)]
        widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
        for row in texts:
            cells = (text + " " * (width - cell_len(text)) for text, width in zip(row, widths, strict=True))
            sys.stdout.write("  ".join(cells).rstrip() + "\n")
        return
    from rich.table import Table  # noqa: PLC0415

    grid = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        grid.add_row(*map(_cell, row))
    _write(grid)


def listing(items: Iterable[T], columns: Sequence[str], cells: Callable[[T], Sequence[Any]], *, as_json: bool) -> None:
    """Write a whole list: as JSON lines, or as a table of what `cells` picks from each item."""
    if as_json:
        for item in items:
            json_line(item)
    else:
        table(columns, map(cells, items))


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print every finding; raises `SystemExit` (1) where one of them is `failed`."""
    if as_json:
        for finding in findings:
            json_line(finding)
    else:
        table(("", "WHAT", "FOUND", "WHAT TO DO"), ((f.verdict, f.subject, f.detail, f.remedy) for f in findings))
    if any(finding.verdict == "failed" for finding in findings):
        raise SystemExit(Exit.FAILED)


def fields(pairs: Iterable[tuple[str, Any]]) -> None:
    """Write names and values under one another, leaving out what is not set."""
    from rich.table import Table  # noqa: PLC0415

    grid = Table.grid(padding=(0, 2))
    for name, value in pairs:
        if value is not None:
            grid.add_row(_cell(name), _cell(value))
    _write(grid)


def tree(root: str, branches: Iterable[str]) -> None:
    """Draw a chain: each branch grows out of the one before."""
    from rich.tree import Tree  # noqa: PLC0415

    top = node = Tree(_cell(root))
    for branch in branches:
        node = node.add(_cell(branch))
    _write(top)


def fold(
    items: Iterable[T],
    *,
    key: Callable[[T], Hashable],
    parent: Callable[[T], Hashable],
    alike: Callable[[T], Hashable],
) -> list[tuple[T, int]]:
    """Return the items, each with 1; of leaves that are alike and follow one another, the first with their number."""
    listed = list(items)
    inner = {parent(item) for item in listed}
    folded: list[tuple[T, int]] = []
    latest: dict[Hashable, tuple[Hashable, int]] = {}  # of a parent's last child: its likeness, its place in `folded`
    for item in listed:
        likeness = (key(item),) if key(item) in inner else (None, alike(item))
        before, place = latest.get(parent(item), (None, 0))
        if likeness == before:
            folded[place] = (folded[place][0], folded[place][1] + 1)
        else:
            latest[parent(item)] = (likeness, len(folded))
            folded.append((item, 1))
    return folded


def draw(
    items: Iterable[T], *, key: Callable[[T], Hashable], parent: Callable[[T], Hashable]
) -> Iterator[tuple[str, T]]:
    """Yield every item with the lines that lead to it, a parent before its children and these in their order.

    `parent` is None for a root. An item whose parent is not among the items is drawn as a root: nothing is left out.
    """
    listed = list(items)
    known = {key(item) for item in listed}
    children: dict[Hashable, list[T]] = {}
    for item in listed:
        above = parent(item)
        children.setdefault(above if above in known else None, []).append(item)
    open_: list[tuple[str, str, T]] = [("", "", root) for root in reversed(children.get(None, []))]
    while open_:
        lead, below, item = open_.pop()
        yield lead, item
        grown = children.get(key(item), [])
        for number, child in enumerate(reversed(grown)):
            stem, line = _BRANCH if number else _LAST
            open_.append((below + stem, below + line, child))


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that can't be undone; without a terminal, or with "no", nothing is done."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise Fatal(Exit.USAGE, f"{question} Add --yes: there is no terminal to ask on")
    import typer  # noqa: PLC0415

    typer.confirm(question, abort=True, err=True)


def reason_or_ask(reason: str | None, *, dry_run: bool = False) -> str:
    """Return why an operator does something; asks on a terminal where the command line does not say it.

    A dry run is not written down, and needs no reason.
    """
    if dry_run:
        return "dry run"
    if reason is None and sys.stdin.isatty() and sys.stderr.isatty():
        import typer  # noqa: PLC0415

        reason = typer.prompt("Reason", err=True)
    if reason is None or not reason.strip():
        raise Fatal(Exit.USAGE, "give a reason with --reason TEXT: it is kept in the operator log")
    return reason


def ago(moment: datetime | None) -> str | None:
    """Say how long ago a moment was: `47s`, `12m`, `3h`, `9d`."""
    if moment is None:
        return None
    seconds = max(0, round((datetime.now(UTC) - moment).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def _cell(value: Any) -> Any:
    from rich.text import Text  # noqa: PLC0415

    text = _text(value)
    return Text(text, style=_STYLES.get(text.split(" ")[0], ""))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        value = value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    return printable(str(value)).replace("\n", " ")


def _write(renderable: Any) -> None:
    from rich.console import Console  # noqa: PLC0415

    console = Console(soft_wrap=False) if sys.stdout.isatty() else Console(width=_WIDE, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    for rendered in capture.get().splitlines():
        sys.stdout.write(rendered.rstrip() + "\n")
