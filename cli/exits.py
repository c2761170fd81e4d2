"""How a command ends: which exit code an error means, and the one sentence that is said about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from postroom.chassis.exits import EXIT_OF, Exit, Fatal

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells say it
READER_GONE: Final = 141  # 128 + SIGPIPE: whoever read the output went away, as `head` does


class Ending(NamedTuple):
    """An exit code, and the sentence for standard error (none where there is nothing to say)."""

    exit_code: int
    sentence: str | None = None


def ending(error: BaseException) -> Ending:
    """Find the exit code and the sentence for whatever a command raised: the first kind that an error is decides.

    What is none of them comes from the clients, or is a bug, which says how to see it.
    """
    kinds: list[tuple[type[BaseException], Callable[[Any], Ending]]] = [(SystemExit, of_exit)]
    if (typer := sys.modules.get("typer")) is not None:  # else nothing of its can have been raised
        kinds += [
            (typer.Exit, lambda error: Ending(error.exit_code)),
            (typer.Abort, lambda _: Ending(Exit.FAILED, "nothing was done")),
            (typer.TyperException, of_usage),
        ]
    kinds += [
        (KeyboardInterrupt, lambda _: Ending(INTERRUPTED, "interrupted")),
        (Fatal, lambda error: Ending(error.exit_code, str(error))),
        (BrokenPipeError, lambda _: Ending(READER_GONE)),
        (OSError, of_the_system),
        (UnicodeEncodeError, of_an_argument),
    ]
    for kind, describe in kinds:
        if isinstance(error, kind):
            return describe(error)
    from postroom import errors  # noqa: PLC0415 - `postroom --help` does without it

    if isinstance(error, errors.PostroomError):
        return Ending(EXIT_OF.get(type(error).__name__, Exit.FAILED), str(error))
    sentence = f"a bug in postroom: {type(error).__name__}: {error} (`postroom --debug …` shows where)"
    return Ending(Exit.FAILED, sentence)


def of_usage(error: Any) -> Ending:
    """Say what is wrong with the command line and how to get help; a bare call is answered with the help itself."""
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is None or message.startswith("Usage:"):
        return Ending(error.exit_code, message)
    return Ending(error.exit_code, f"{message} (`{context.command_path} --help` helps)")


def of_exit(error: Any) -> Ending:
    """Take over the code of a command that ended itself; where its reader went away Typer says 1, shells expect 141."""
    if isinstance(error.__context__, BrokenPipeError):
        return Ending(READER_GONE)
    return Ending(error.code if isinstance(error.code, int) else Exit.FAILED)


def of_the_system(error: Any) -> Ending:
    """Say which file, or which end of the pipe, could not be read or written."""
    return Ending(Exit.IO_ERROR, f"{error.filename or 'standard input or output'}: {error.strerror}")


def of_an_argument(error: Any) -> Ending:
    """Say which text of the command line is none: what is not UTF-8 travels as no id, name or reason."""
    return Ending(Exit.USAGE, f"{error.object!r} is not UTF-8 text: pass UTF-8, or a file")


def say(end: Ending) -> int:
    """Write the sentence to standard error and return the exit code, even where output can't be written any more."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered has nowhere to go
    if end.sentence:
        head = "" if end.sentence.startswith("Usage:") else "postroom: "
        print(head + printable(end.sentence), file=sys.stderr, flush=True)  # noqa: T201
    return int(end.exit_code)


def printable(text: str) -> str:
    """Escape every control character, so that a row's content can't steer the reader's terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def stand_in_for_closed_streams() -> None:
    """Give a closed standard stream a descriptor of its own, so that no socket lands there.

    Reading a closed input and writing to a closed output then fail with `EBADF`; what would go to a closed
    standard error is dropped. Text that the terminal's encoding lacks is escaped.
    """
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDWR)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
