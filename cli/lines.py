"""Messages from a file or a pipe, a line each, read as they are needed: a million lines never lie in memory."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import SendRequest
    from postroom.errors import Problem

MAX_LINE: Final = 16 * 1024 * 1024  # bytes; a longer line fails alone


class Source:
    """The messages of one file or pipe, in order; the mark that some editors put before UTF-8 is none of them.

    `parse` makes a message of a line and its number; `refuse` is told of each line that is no message, from whatever
    thread walks the source. `numbers` remembers the line of each message that has not been answered yet.
    """

    def __init__(
        self,
        stream: BinaryIO,
        parse: Callable[[bytes, int], SendRequest],
        refuse: Callable[[int, Problem], None],
    ) -> None:
        self._stream = stream
        self._parse = parse
        self._refuse = refuse
        self.bytes_read = 0
        self.blank = 0
        self.numbers: dict[int, int] = {}  # the message's place among the messages → its line

    def __iter__(self) -> Iterator[SendRequest]:
        place = 0
        for number, line in enumerate(self._lines(), 1):
            text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if (message := self._message(text.removesuffix(b"\n").removesuffix(b"\r"), number)) is not None:
                place += 1
                self.numbers[place] = number
                yield message

    def _message(self, text: bytes, number: int) -> SendRequest | None:
        from postroom.errors import InvalidMessage  # noqa: PLC0415

        if not text:
            self.blank += 1
            return None
        try:
            return self._parse(text, number)
        except InvalidMessage as error:
            self._refuse(number, error.problem)
            return None

    def _lines(self) -> Iterator[bytes]:
        """Yield each line; of one that is too long, its beginning, which no parser takes."""
        while line := self._stream.readline(MAX_LINE + 1):
            self.bytes_read += len(line)
            yield line
            while len(line) > MAX_LINE and not line.endswith(b"\n"):
                line = self._stream.readline(MAX_LINE + 1)
                self.bytes_read += len(line)


def open_source(file: Path) -> BinaryIO:
    """Open a file or pipe of messages (`-`: standard input); raises `Fatal` where that can't be read."""
    if str(file) == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    try:
        stream = file.open("rb")
    except OSError as error:
        raise Fatal(Exit.USAGE, f"cannot read {file}: {error.strerror}") from error
    return stream


def size_of(stream: BinaryIO) -> int | None:
    """Return how many bytes a plain file has; None for a pipe, whose end nobody knows."""
    status = os.fstat(stream.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None
