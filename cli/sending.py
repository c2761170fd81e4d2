"""Sending many messages: the stream, the progress bar, the count, and what to say about every line that failed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple, TextIO

from cli.connect import with_daemon
from cli.lines import Source, size_of
from cli.output import json_line, line, note
from postroom.chassis.exits import Exit

if TYPE_CHECKING:
    from postroom import BatchResult, Client, SendRequest
    from postroom.errors import Problem

PATIENCE: Final = 30.0  # seconds without any answer from a daemon that was there before


class Count(NamedTuple):
    """How many messages ended how."""

    queued: int = 0
    duplicates: int = 0
    failed: int = 0
    blank: int = 0

    def __str__(self) -> str:
        text = f"{self.queued} queued, {self.duplicates} duplicates, {self.failed} failed"
        lines = "blank line" if self.blank == 1 else "blank lines"
        return text + (f", {self.blank} {lines} skipped" if self.blank else "")


class Sending:
    """One run over a file or pipe; `count` is right at every moment, an interrupted run's too."""

    def __init__(
        self, stream: BinaryIO, parse: Callable[[bytes, int], SendRequest], errors: TextIO | None, *, as_json: bool
    ) -> None:
        self._source = Source(stream, parse, self._fail)
        self._errors = errors
        self._as_json = as_json
        self._queued = self._duplicates = self._failed = 0
        self._saying = threading.Lock()  # lines are refused by the thread that reads them

    @property
    def count(self) -> Count:
        """How far it is."""
        return Count(self._queued, self._duplicates, self._failed, self._source.blank)

    def run(self, client: Client, show: Callable[[int, Count], None]) -> None:
        """Send everything, calling `show` with the bytes read so far; raises what stops the whole."""
        for results in client.send_many_in_chunks(self._source):
            for result in results:
                self._settle(result)
            sys.stdout.flush()  # whoever reads the results may be waiting for them
            show(self._source.bytes_read, self.count)

    def _settle(self, result: BatchResult) -> None:
        result.line = self._source.numbers.pop(result.line)
        if result.problem is not None:
            self._fail(result.line, result.problem)
            return
        if result.result is not None and result.result.duplicate:
            self._duplicates += 1
        else:
            self._queued += 1
        if self._as_json:
            with self._saying:
                json_line(result)

    def _fail(self, number: int, problem: Problem) -> None:
        from postroom._wire.sends import BatchResult  # noqa: PLC0415

        with self._saying:
            self._failed += 1
            if self._as_json:
                json_line(BatchResult(line=number, problem=problem))
            if self._errors is not None:
                json_line({"line": number, "code": problem.code, "detail": problem.detail}, self._errors)
            else:
                note(f"line {number}: {problem.detail}")


def send_lines(
    socket: Path | None,
    stream: BinaryIO,
    parse: Callable[[bytes, int], SendRequest],
    errors: TextIO | None,
    *,
    as_json: bool,
) -> None:
    """Send every line of `stream` and say how many ended how; exit code 1 where any failed."""
    with_daemon(socket, lambda client: client.version())  # an absent daemon is said soon, before a line is read
    sending = Sending(stream, parse, errors, as_json=as_json)
    try:
        with progress(size_of(stream)) as show:
            with_daemon(socket, lambda client: sending.run(client, show), patience=PATIENCE)
    finally:
        note(str(sending.count)) if as_json else line(str(sending.count))
    if sending.count.failed:
        raise SystemExit(Exit.FAILED)


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[int, Count], None]]:
    """Show a progress bar on standard error while it is a terminal; `total` is in bytes, None for a pipe."""
    if not sys.stderr.isatty():
        yield lambda _read, _count: None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sending", total=total)
        yield lambda read, count: bar.update(task, completed=read, description=str(count))
