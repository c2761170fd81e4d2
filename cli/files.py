"""Files that a command line names: how they are opened and read, and the error for one that cannot be."""

import codecs
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, TextIO

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import put_new, read_regular, read_whole, sync


@contextmanager
def file_errors(what: str, file: Path, code: Exit = Exit.USAGE) -> Iterator[None]:
    """Raise `Fatal` that says why one cannot do `what` (read, write) with the file."""
    try:
        yield
    except OSError as error:
        raise Fatal(code, f"cannot {what} {file}: {error.strerror}; choose a file that you can {what}") from error


@contextmanager
def new_file(file: Path) -> Iterator[BinaryIO]:
    """Open a file (0600) that gets its name when the block ends, on disk and whole; if the block fails, none appears.

    A signal that would end the process fails it as well. Raises `Fatal` if the name is taken.
    """
    from cli.stack.supervisor import interruptible  # noqa: PLC0415 - it is slow to import, and few verbs write a file

    taken = Fatal(Exit.IO_ERROR, f"cannot write {file}: it exists; choose another name")
    with file_errors("write", file, Exit.IO_ERROR), interruptible():
        if os.path.lexists(file):
            raise taken
        descriptor, draft = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            try:
                with open(descriptor, "wb", closefd=False) as stream:
                    yield stream
            finally:
                os.close(descriptor)
            put_new(Path(draft), file)
        except FileExistsError:
            raise taken from None
        finally:
            Path(draft).unlink(missing_ok=True)
        sync(file.parent)


@contextmanager
def emptied(file: Path, source: BinaryIO) -> Iterator[TextIO]:
    """Open a file for lines, without what it held before; raises `Fatal` where `source` is read from that file."""
    with file_errors("write", file):
        stream = file.open("a", encoding="utf-8")
    try:
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode):
            if os.path.samestat(status, os.fstat(source.fileno())):
                raise Fatal(Exit.USAGE, f"{file} is the file that is read: choose another one to write")
            stream.truncate(0)
        yield stream
    finally:
        with file_errors("write", file, Exit.IO_ERROR):
            stream.close()


def open_source(file: Path) -> BufferedReader:
    """Open a file or pipe of messages (`-`: standard input); raises `Fatal` where that can't be read."""
    if str(file) == "-":
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with file_errors("read", file):
        return file.open("rb")


def read_source(file: Path) -> bytes:
    """Return all that a file or pipe holds (`-`: standard input); raises `Fatal` for one without an end in sight."""
    with open_source(file) as stream, file_errors("read", file):
        return read_whole(stream)


def size_of(stream: BinaryIO) -> int | None:
    """Return how many bytes a plain file has; None for a pipe, whose length is unknown."""
    status = os.fstat(stream.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def read_plain_file(file: Path) -> bytes:
    """Return the text that a plain file holds; a FIFO, a device or a directory is refused before a byte is read."""
    with file_errors("read", file):
        return read_regular(file)[0].removeprefix(codecs.BOM_UTF8)
