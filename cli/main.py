"""`postroom`: reads the command line, runs one verb, and turns any error into one sentence and an exit code.

The exit codes are `chassis.exits.Exit`, and 130 if the user pressed Ctrl-C.
"""

import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

from cli.message import parse_send, send_one
from cli.output import note, printable
from postroom._wire.words import not_text
from postroom.chassis import collect_rarely
from postroom.chassis.exits import EXIT_OF, Exit, Fatal, replace_closed_streams, write_last

INTERRUPTED: Final = 130  # 128 + SIGINT, as shells say it
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE: the reader of the output closed it, as `head` does
_KINDS: Final = (  # what Typer calls a kind of number, and what people do
    ("is not a valid int range.", "is not a whole number"),
    ("is not a valid integer.", "is not a whole number"),
    ("is not a valid float range.", "is not a number"),
)


def main() -> NoReturn:
    """Run the command line and end the process."""
    collect_rarely()
    code = run(sys.argv[1:])
    gc.freeze()  # or Python searches for garbage three times as it ends
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; an error is written to standard error."""
    replace_closed_streams()
    warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr] # what the terminal's encoding lacks
    try:
        code = call(arguments)
        sys.stdout.flush()
    except BaseException as error:  # noqa: BLE001 - the one place where an error becomes an exit code
        if os.environ.get("POSTROOM_DEBUG") == "1":
            traceback.print_exception(error)
        return say(ending(error))
    return code


def call(arguments: list[str]) -> int:
    """Run one command and return the exit code that it chose; raises any exception that ended it."""
    if (brief := parse_send(arguments)) is not None:
        from postroom._wire.message import parse_destination  # noqa: PLC0415

        content = brief.body.encode(errors="surrogateescape")
        to, options = str(parse_destination(brief.to)), {"priority": brief.priority, "reply_to": brief.reply_to}
        send_one(brief.socket, to, content, options, brief.client_message_id, wait=None, as_json=brief.as_json)
        return 0
    if arguments[:1] == ["status"]:
        from cli.installation import parse_status  # noqa: PLC0415

        if (wanted := parse_status(arguments)) is not None:
            from cli.screen import show_status  # noqa: PLC0415

            place, as_json = wanted
            show_status(place, as_json=as_json)
            return 0
    from cli.app import call as call_verb  # noqa: PLC0415 - Typer takes longer to import than such a send takes

    code = call_verb(arguments)
    if code == INTERRUPTED:  # Typer has turned Ctrl-C into a code
        raise KeyboardInterrupt
    return code


class Ending(NamedTuple):
    """An exit code, and the sentence for standard error, if there is one."""

    exit_code: int
    sentence: str | None = None


def ending(error: BaseException) -> Ending:
    """Return the exit code and the sentence for what a command raised: the first matching kind decides.

    Any other error comes from the clients, or is a bug, whose sentence says how to see the traceback.
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
        (BrokenPipeError, lambda _: Ending(BROKEN_PIPE)),
        (OSError, of_the_system),
        (UnicodeEncodeError, lambda error: Ending(Exit.USAGE, not_text(error))),  # no id, name or reason is such text
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
    """Say what is wrong with the command line and how to get help; for a bare call the sentence is the help itself."""
    message = error.format_message()
    for theirs, ours in _KINDS:
        message = message.replace(theirs, ours)
    context = getattr(error, "ctx", None)
    if context is None or message.startswith("Usage:"):
        return Ending(error.exit_code, message)
    return Ending(error.exit_code, f"{message} (`{context.command_path} --help` helps)")


def of_exit(error: Any) -> Ending:
    """Keep the code of a command that ended itself; after a broken pipe Typer exits with 1, shells expect 141."""
    if isinstance(error.__context__, BrokenPipeError):
        return Ending(BROKEN_PIPE)
    return Ending(error.code if isinstance(error.code, int) else Exit.FAILED)


def of_the_system(error: Any) -> Ending:
    """Say which file, or which end of the pipe, could not be read or written."""
    if error.filename is None and isinstance(error, FileNotFoundError):  # of a relative path
        return Ending(Exit.IO_ERROR, "the working directory has been removed: change to another one")
    if error.filename is not None and isinstance(error, PermissionError):
        return Ending(Exit.NOT_PERMITTED, f"{error.filename}: {error.strerror}; use an account that may")
    return Ending(Exit.IO_ERROR, f"{error.filename or 'standard input or output'}: {error.strerror}")


def say(end: Ending) -> int:
    """Write the sentence to standard error and return the exit code, even if output can't be written any more.

    That is the end where there was no other sentence, only a code that what was written explains.
    """
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered has nowhere to go
        if end.sentence is None:
            end = ending(error)
    sentence = end.sentence or ""
    head = "" if sentence.startswith("Usage:") else "postroom: "
    write_last(f"{head}{printable(sentence)}\n" if sentence else "")
    return int(end.exit_code)
