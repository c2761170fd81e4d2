"""`postroom send`: hand in one message, or a file or pipe of them (docs/contract/operate.md#operate-7).

A line each, read as they are needed: a million lines never lie in memory.
"""

import codecs
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, NamedTuple, TextIO

import typer
from msgspec.structs import replace

from cli import completion
from cli.connect import RESTARTING, with_daemon
from cli.files import emptied, open_source, read_source, size_of
from cli.message import PRIORITIES, body_of, send_one
from cli.noun import Json, Socket, choice, duration, file_name, named, noun, time_of
from cli.output import json_line, line, note, progress
from postroom import Client, SendRequest
from postroom._wire.arguments import compose
from postroom._wire.message import Priority, decode_request, parse_destination, refuse
from postroom._wire.names import MESSAGE_ID
from postroom._wire.sends import BatchResult
from postroom._wire.words import counted
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import InvalidMessage, Problem

app = noun()

_WAIT_SECONDS: Final = 60.0
MAX_LINE: Final = 16 * 1024 * 1024  # bytes; a longer line fails alone
_MAX_SKIPPED: Final = 256  # MiB of such a line that are read; one that goes on after that is the last


@app.command()
def send(
    *,
    to: Annotated[
        str | None,
        typer.Argument(
            metavar="TO",
            help="topic:NAME, dm:MEMBER or queue:NAME (not with --ndjson).",
            autocompletion=completion.destinations,
        ),
    ] = None,
    body: Annotated[
        str | None, typer.Argument(metavar="[BODY|-]", help="The text; `-`: a message per line of standard input.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A message per line of a file (`-`: standard input).")
    ] = None,
    ndjson: Annotated[
        bool, typer.Option("--ndjson", help='The lines are whole messages: {"to": …, "body": …, …}.')
    ] = False,
    body_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One message: all that a file holds (`-`: standard input).")
    ] = None,
    client_message_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The message's id; sending it again changes nothing.")
    ] = None,
    id_prefix: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Line 7 gets the id TEXT-000000007, so that a run can be repeated."),
    ] = None,
    meta: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Meta data; may be repeated.")] = None,
    priority: Annotated[
        str, typer.Option(**choice("priority", PRIORITIES), metavar="PRIORITY", help="now, next or low.")
    ] = "next",
    reply_to: Annotated[str | None, typer.Option(metavar="ID", help="The message that this one answers.")] = None,
    mention: Annotated[
        list[str] | None, typer.Option(metavar="MEMBER", help="May be repeated.", **named("member"))
    ] = None,
    not_before: Annotated[str | None, typer.Option(metavar="TIME", help="Not before 2026-11-21T09:00:00Z.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the broker has accepted the message.")] = False,
    timeout: Annotated[
        float | None, typer.Option(parser=duration, metavar="DURATION", help="How long to --wait [default: 60s].")
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write failed lines there as JSON [default: standard error].", callback=file_name
        ),
    ] = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Send a message; when this ends with exit code 0 the message is on disk, and will be sent."""
    if timeout is not None and not wait:
        raise Fatal(Exit.USAGE, "--timeout says how long to --wait: give both")
    _check_prefix(id_prefix)
    common = Common(meta_of(meta), priority, reply_to, mention, moment_of(not_before))  # type: ignore[arg-type]
    if ndjson:
        to = None if (to, body, file) == ("-", None, None) else to  # `-` without TO: standard input
        if to is not None or body is not None or common != Common():
            raise Fatal(Exit.USAGE, "with --ndjson each line is a whole message: omit TO and the message's options")
        file = file or Path("-")
    if sum(given is not None for given in (body, file, body_file)) != 1:
        raise Fatal(Exit.USAGE, "give one of BODY, `-` (a message per line of standard input), --file and --body-file")
    source = Path("-") if body == "-" else file
    if source is None:
        _refuse_options("many lines", "one message", id_prefix=id_prefix, errors=errors)
        patience = (_WAIT_SECONDS if timeout is None else timeout) if wait else None
        content = read_source(body_file) if body_file is not None else (body or "").encode(errors="surrogateescape")
        send_one(socket, _destination(to), content, common._asdict(), client_message_id, wait=patience, as_json=as_json)
        return
    _refuse_options("one message", "many lines", id=client_message_id, wait=wait or None)
    parse = partial(_whole, id_prefix) if ndjson else partial(_body, _destination(to), common, id_prefix)
    stream = open_source(source)
    with closing(stream.raw), ExitStack() as opened:  # closing the buffer, which a thread reads, waits for a line
        refused = None if errors is None else opened.enter_context(emptied(errors, stream))
        send_lines(socket, stream, parse, refused, as_json=as_json)


def _destination(to: str | None) -> str:
    if to is None:
        raise Fatal(Exit.USAGE, "give a destination: topic:NAME, dm:MEMBER or queue:NAME")
    return str(parse_destination(to))


def _check_prefix(prefix: str | None) -> None:
    """Refuse what no id of a line can begin with; nothing at all would give every run of everybody the same ids."""
    if prefix is not None and not (prefix and MESSAGE_ID.allows(_id(prefix, 1) or "")):
        raise typer.BadParameter(
            f"{prefix!r} begins no id: give 1 to 118 characters of A-Za-z0-9._:~-", param_hint="--id-prefix"
        )


def _refuse_options(meant: str, sent: str, **options: object) -> None:
    """Refuse options that would be overlooked, since they are `meant` for something else than what is `sent`."""
    if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise Fatal(Exit.USAGE, f"{given[0]} is for {meant}: omit it to send {sent}")


class Common(NamedTuple):
    """What the options say about every message."""

    meta: dict[str, Any] | None = None
    priority: Priority = "next"
    reply_to: str | None = None
    mentions: Sequence[str] | None = None
    not_before: datetime | None = None


def meta_of(pairs: Sequence[str] | None) -> dict[str, Any] | None:
    """Read `k=v` pairs; a value is text, and a key given twice a mistake."""
    meta: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, value = pair.partition("=")
        if not equals or not key or key in meta:
            raise typer.BadParameter(f"{pair!r}: write key=value, each key once", param_hint="--meta")
        meta[key] = value
    return meta or None


def moment_of(text: str | None) -> datetime | None:
    """Read an RFC 3339 time with its offset."""
    if text is None:
        return None
    moment = time_of(text)
    if moment is None or moment.tzinfo is None:
        raise typer.BadParameter(
            f"{text!r} is not a time with an offset, as in 2026-11-21T09:00:00Z", param_hint="--not-before"
        )
    return moment


def _body(to: str, common: Common, id_prefix: str | None, line: bytes, number: int) -> SendRequest:
    return compose(to, body_of(line), **common._asdict(), client_message_id=_id(id_prefix, number))


def _whole(id_prefix: str | None, line: bytes, number: int) -> SendRequest:
    """Read a line that is a whole message, as `POST /v1/send/batch` takes it."""
    message = decode_request(line)
    if message.client_message_id is None and id_prefix is not None:
        return replace(message, client_message_id=_id(id_prefix, number))
    return message


def _id(prefix: str | None, number: int) -> str | None:
    """Build the id of a line; such ids sort as their lines do."""
    return None if prefix is None else f"{prefix}-{number:09d}"


class BulkSend:
    """One run over a file or pipe; its counts are right at every moment, an interrupted run's too.

    `parse` makes a message of a line and its number; a byte order mark at the beginning is skipped.
    """

    def __init__(
        self, stream: BinaryIO, parse: Callable[[bytes, int], SendRequest], errors: TextIO | None, *, as_json: bool
    ) -> None:
        self._stream = stream
        self._parse = parse
        self._errors = errors
        self._as_json = as_json
        self.queued = self.duplicates = self.failed = self.blank = 0
        self._bytes_read = 0
        self._numbers: dict[int, int] = {}  # the place among the messages of each without an answer → its line
        self._saying = threading.Lock()  # lines are refused by the thread that reads them

    def __str__(self) -> str:
        text = f"{self.queued:,} queued, {counted(self.duplicates, 'duplicate')}, {self.failed:,} failed"
        return text + (f", {counted(self.blank, 'blank line')} skipped" if self.blank else "")

    def run(self, client: Client, show: Callable[..., None]) -> None:
        """Send everything, showing how far it is, in bytes of the total; raises what stops the whole."""
        for results in client.send_many_in_chunks(self._messages()):
            for result in results:
                result.line = self._numbers.pop(result.line)
                if result.problem is not None:
                    self._fail(result.line, result.problem)
                    continue
                if result.result is not None and result.result.duplicate:
                    self.duplicates += 1
                else:
                    self.queued += 1
                if self._as_json:
                    with self._saying:
                        json_line(result)
            sys.stdout.flush()  # the reader of the results may be waiting for them
            show(self.queued + self.duplicates + self.failed + self.blank, str(self), place=self._bytes_read)

    def _messages(self) -> Iterator[SendRequest]:
        place = 0
        for number, read in enumerate(self._lines(), 1):
            text = read.removeprefix(codecs.BOM_UTF8) if number == 1 else read
            text = text.removesuffix(b"\n").removesuffix(b"\r")
            if not text:
                self.blank += 1
                continue
            try:
                if len(text) > MAX_LINE:
                    refuse("payload_too_large", f"the line has more than {MAX_LINE} bytes", "body")
                message = self._parse(text, number)
            except InvalidMessage as error:
                self._fail(number, error.problem)
                continue
            place += 1
            self._numbers[place] = number
            yield message

    def _lines(self) -> Iterator[bytes]:
        """Yield each line; of one that is too long, its beginning, which no parser takes.

        One without an end in sight, such as `/dev/zero`, is the last.
        """
        pieces = iter(partial(self._stream.readline, MAX_LINE + 1), b"")
        for number, beginning in enumerate(pieces, 1):
            piece, before = beginning, self._bytes_read
            self._bytes_read += len(piece)
            yield beginning
            while len(piece) > MAX_LINE and not piece.endswith(b"\n"):
                if self._bytes_read - before > _MAX_SKIPPED * 1024 * 1024:
                    end = f"line {number} does not end within {_MAX_SKIPPED} MiB: it is the last that was read"
                    with self._saying:
                        note(f"postroom: {end}")
                    return
                piece = next(pieces, b"")
                self._bytes_read += len(piece)

    def _fail(self, number: int, problem: Problem) -> None:
        with self._saying:
            self.failed += 1
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
    bulk = BulkSend(stream, parse, errors, as_json=as_json)
    try:
        with progress(size_of(stream), as_json=as_json) as show:
            with_daemon(socket, lambda client: bulk.run(client, show), patience=RESTARTING)
    finally:
        note(str(bulk)) if as_json else line(str(bulk))
    if bulk.failed:
        raise SystemExit(Exit.FAILED)
