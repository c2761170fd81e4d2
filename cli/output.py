"""What the command line prints: JSON lines for programs, tables for people, and questions only on a terminal.

On a terminal a table has colours (unless `NO_COLOR` is set); in a pipe it is plain and never cut to a width.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby, zip_longest
from typing import Any, Final, TextIO, TypeVar

import msgspec

from postroom._wire.trees import Branch, Thing, grow
from postroom._wire.words import when
from postroom.chassis.exits import Exit, Fatal, Finding

T = TypeVar("T")
B = TypeVar("B", bound=Thing)

_BRANCH: Final = ("├─ ", "│  ")  # before an item of a tree, before what grows out of it
_LAST: Final = ("└─ ", "   ")
_SENTENCE: Final = 24  # columns that a longer sentence gets at least
_UNSEEN_SECONDS: Final = 1.0  # that something takes before anybody needs to see how far it is
_FRAME_SECONDS: Final = 0.1
_WORDS: Final = re.compile(r"#.*|(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+")  # of a shell; a comment is one
_DUMB: Final = {"dumb", "unknown"}  # as Rich has it too
_ERASE: Final = "\r\033[K"
_COLOURS: Final = {  # of a line, by what it says, and of a cell, by its first word
    **dict.fromkeys(("down", "dead", "failed", "FAILED"), "1;31"),
    "wrong": "31",
    **dict.fromkeys(("look", "waiting", "pending", "paused"), "33"),
    **dict.fromkeys(("well", "ok", "done"), "32"),
    **dict.fromkeys(("help", "running", "inflight"), "36"),
    "head": "1",
    "aborted": "2",
    "ended": "90",
}


def display_width(text: str) -> int:
    """Return how many columns a text takes on a terminal: a wide character two, one that combines with another none."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - few texts need it

    return cell_len(text)


class _Piece(str):
    """A piece of a text, as long as it is wide."""

    __slots__ = ()

    def __len__(self) -> int:
        return display_width(str(self))


class WholeWords(textwrap.TextWrapper):
    """Folds text to lines within a width; no word is broken."""

    def __init__(self, width: int, first: str = "", below: str = "") -> None:
        super().__init__(width, first, below, break_on_hyphens=False, break_long_words=False)

    def _split(self, text: str) -> list[str]:
        return list(map(_Piece, super()._split(text)))


def can_draw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that has a cursor to move, and colours."""
    return stream.isatty() and os.environ.get("TERM") not in _DUMB


def coloured() -> bool:
    """Return whether standard output has colours, which an empty `NO_COLOR` does not take from it (no-color.org)."""
    return can_draw(sys.stdout) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str | None) -> str:
    """Return a text in its style, if it has one and standard output has colours."""
    return f"\033[{_COLOURS[style]}m{text}\033[0m" if text and style in _COLOURS and coloured() else text


def line_width() -> int:
    """Return how many columns a line may have: those of the terminal, or any number of them."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def printable(text: str) -> str:
    """Escape every control character, so that a row's content can't steer the reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def folded(text: str, width: int, first: str = "", below: str = "", style: str | None = None) -> list[str]:
    """Fold a text to lines within the width; no word of it is broken, and nothing in it steers the terminal."""
    lines = WholeWords(width, first, below).wrap(printable(text.replace("\n", " ")))
    return [styled(line, style) for line in lines]


class Progress:
    """How far something is that takes longer than a second: one line on standard error, while that is a terminal.

    Whatever else is written erases it first, so that nothing is drawn over it.
    """

    _drawn = False

    def __init__(self, total: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._began = clock()
        self._next = self._began + _UNSEEN_SECONDS

    def show(self, count: int, words: str, *, place: int | None = None) -> None:
        """Say so, with how many a second; with a total also how much of it `place` is, as a rule the count."""
        now = self._clock()
        if now < self._next:
            return
        self._next, seconds = now + _FRAME_SECONDS, now - self._began
        said = f"{words}, {count / seconds:,.0f} a second"
        if self._total and (reached := count if place is None else place):
            left = max(0, self._total - reached) * seconds / reached
            said += f", {min(1.0, reached / self._total):.0%}, {left:,.0f} s left"
        self.say(said)

    @classmethod
    def say(cls, words: str) -> None:
        """Say what is done just now, until something else is written."""
        if can_draw(sys.stderr):
            text, room = printable(words), shutil.get_terminal_size().columns - 1
            while text and display_width(text) > room:
                text = text[:-1]
            sys.stderr.write(_ERASE + text)
            sys.stderr.flush()
            cls._drawn = True

    @classmethod
    def erase(cls) -> None:
        """Remove it from the screen."""
        if cls._drawn:
            cls._drawn = False
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


@contextmanager
def progress(total: int | None = None, *, as_json: bool = False) -> Iterator[Callable[..., None]]:
    """Yield `Progress.show` for something of `total` parts (None: unknown); with `as_json` one that shows nothing."""
    try:
        yield (lambda *_, **__: None) if as_json else Progress(total).show
    finally:
        Progress.erase()


def json_line(value: Any, stream: TextIO | None = None, *, flush: bool = False) -> None:
    """Write one JSON object as a line, to standard output where no stream is named; with `flush` it is seen at once."""
    Progress.erase()
    print(msgspec.json.encode(value, enc_hook=str).decode(), file=stream or sys.stdout, flush=flush)


def line(text: str, *, flush: bool = False) -> None:
    """Write one line for people; whatever could steer a terminal is escaped. With `flush` it is seen at once."""
    Progress.erase()
    print(printable(text), flush=flush)  # noqa: T201


def note(text: str) -> None:
    """Write a sentence to standard error, apart from the output."""
    Progress.erase()
    print(printable(text), file=sys.stderr, flush=True)  # noqa: T201


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table; a cell is text, a number, a time, or None for nothing."""
    sys.stdout.writelines(f"{drawn}\n" for drawn in draw_table(columns, rows, line_width()))


def draw_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], width: int) -> Iterator[str]:
    """Yield the lines of a table within a width, where no word of a cell is ever cut.

    Long sentences fold within their column, and where the columns do not fit all the same, the last ones are below the
    others, each after its name.
    """
    texts = [[*columns], *(list(map(_text, row)) for row in rows)]
    lengths = [list(map(display_width, row)) for row in texts]
    sizes = list(map(max, zip(*lengths, strict=True)))
    if _room(sizes, width) >= 0 and not coloured():  # as in a pipe: of a large outbox there are many rows
        for row, each in zip(texts, lengths, strict=True):
            cells = zip(row, each, sizes, strict=True)
            yield "  ".join(text + " " * (size - length) for text, length, size in cells).rstrip()
        return
    words = (
        max(display_width(word) for text in column for word in text.split(" ")) for column in zip(*texts, strict=True)
    )
    sizes = _fit(sizes, [max(word, _SENTENCE) for word in words], width)
    side = len(sizes)
    for number, row in enumerate(texts):
        folds = [
            [text] if length <= size else WholeWords(size).wrap(text)
            for text, length, size in zip(row, lengths[number], sizes, strict=False)
        ]
        styles = ["head" if number == 0 else text.split(" ")[0] for text in row]
        for parts in zip_longest(*folds, fillvalue=""):
            drawn = zip(parts, styles, sizes, strict=False)
            yield "  ".join(
                styled(part, style) + " " * (size - display_width(part)) for part, style, size in drawn
            ).rstrip()
        if number:
            below = [f"{name} {text}" for name, text in zip(columns[side:], row[side:], strict=True) if text]
            yield from folded("  ".join(below), width, "  ", "    ")


def _room(sizes: Sequence[int], width: int) -> int:
    """Return how much columns of these sizes leave of a width, with two spaces between them."""
    return width - sum(sizes) - 2 * (len(sizes) - 1)


def _fit(sizes: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Return the sizes of the columns that are side by side: folded down to the `least`, or fewer of them."""
    fitted = list(map(min, sizes, least))
    if (spare := _room(fitted, width)) < 0:
        side = next(count for count in range(len(sizes), 0, -1) if count == 1 or _room(sizes[:count], width) >= 0)
        return [min(sizes[0], max(width, 1)), *sizes[1:side]]
    for number, size in enumerate(sizes):
        more = min(size - fitted[number], spare)
        fitted[number], spare = fitted[number] + more, spare - more
    return fitted


def listing(
    items: Sequence[T], columns: Sequence[str], cells: Callable[[T], Sequence[Any]], *, things: str, as_json: bool
) -> None:
    """Write a list of `things`, if there are any: as JSON lines, or as a table of what `cells` picks from each."""
    if as_json:
        for item in items:
            json_line(item)
    elif items:
        table(columns, map(cells, items))
    else:
        line(f"no {things}")


def one_by_one(items: Iterable[T], show: Callable[[T], None], *, as_json: bool) -> None:
    """Write things whole: as JSON lines, or as `show` does, with an empty line between two."""
    for number, item in enumerate(items):
        if as_json:
            json_line(item)
            continue
        if number:
            line("")
        show(item)


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
    """Write names and values under one another, leaving out what is not set; on a terminal values fold."""
    cells = [(_text(name), _text(value)) for name, value in pairs if value is not None]
    left = max((len(name) for name, _ in cells), default=0) + 2
    words = WholeWords(max(line_width() - left, _SENTENCE))
    for name, text in cells:
        for begin, part in zip_longest((name,), words.wrap(text) or ("",), fillvalue=""):
            sys.stdout.write(f"{begin:<{left}}{styled(part, text.split(' ')[0])}".rstrip() + "\n")


def tree(root: str, branches: Iterable[str]) -> None:
    """Draw a chain: each branch grows out of the one before; on a terminal it folds."""
    width = line_width()
    stem, below = _LAST
    for depth, text in enumerate([root, *branches]):
        first = below * (depth - 1) + stem if depth else ""
        for each in folded(text, width, first, below * (depth + 1)):
            line(each)


def draw(things: Iterable[B], alike: Callable[[B], Hashable] | None = None) -> Iterator[tuple[str, B, int]]:
    """Yield every thing with the lines that lead to it, a parent before its children and these in their order, and 1.

    Of leaves that are `alike` and follow one another, it is the first with their number.
    """

    def runs(branches: list[Branch[B]]) -> Iterator[tuple[Branch[B], int]]:
        def likeness(branch: Branch[B]) -> Hashable:
            return branch.thing.id if alike is None or branch.children else (alike(branch.thing),)

        for _, run in groupby(branches, likeness):
            first, *others = run
            yield first, 1 + len(others)

    open_ = [("", "", root) for root in reversed([*runs(grow(things))])]
    while open_:
        lead, below, (branch, count) = open_.pop()
        yield lead, branch.thing, count
        for number, child in enumerate(reversed([*runs(branch.children)])):
            stem, line = _BRANCH if number else _LAST
            open_.append((below + stem, below + line, child))


def fold_command(command: str, width: int, indent: str) -> Iterator[str]:
    """Yield the lines of a command that can be pasted as they are: they end in a backslash, and no word is broken."""
    line = indent
    for word in _WORDS.findall(printable(command)):
        if line.strip() and display_width(f"{line}{word} \\") > width:
            yield line + "\\"
            line = indent + "  "
        line += word + " "
    yield line.rstrip()


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


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, datetime):
        value = when(value)
    if isinstance(value, dict):
        value = msgspec.json.encode(value, enc_hook=str).decode()
    return printable(str(value)).replace("\n", " ")
