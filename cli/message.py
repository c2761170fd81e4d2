"""One message from the command line: parsed without Typer if possible, sent, and its outcome.

Programs run `postroom send TO BODY` for each of their messages, and Typer takes longer to import than such a send
takes. Only what is plainly such a send is read here: whatever else a line has, and every mistake in it, is Typer's
(`cli/send.py`), which explains it. A test reads the same lines both ways.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cli.connect import RESTARTING, advised, with_daemon
from cli.output import json_line, line, note
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import Client

_OPTIONS: Final = {
    "--id": "client_message_id",
    "--priority": "priority",
    "--reply-to": "reply_to",
    "--socket": "socket",
}
_PATHS: Final = ("state", "socket", "token_file")
PRIORITIES: Final = ("now", "next", "low")


class BriefSend(NamedTuple):
    """One message from the command line, and how to write its outcome."""

    to: str
    body: str
    client_message_id: str | None = None
    priority: str = "next"
    reply_to: str | None = None
    socket: Path | None = None
    as_json: bool = False


def parse_send(arguments: list[str], environ: Mapping[str, str] = os.environ) -> BriefSend | None:
    """Read `send TO BODY` with the options that are usual; None for any other line."""
    if (found := plain_line("send", _OPTIONS, arguments, environ)) is None:
        return None
    plain, given = found
    if len(plain) != 2 or "" in plain or given.get("priority", "next") not in PRIORITIES:  # noqa: PLR2004 - TO, BODY
        return None
    to, body = plain
    return BriefSend(to, body, **given)


def plain_line(
    verb: str, options: Mapping[str, str], arguments: list[str], environ: Mapping[str, str]
) -> tuple[list[str], dict[str, Any]] | None:
    """Read a line of `verb`: its words, and by their names `--json` and `options`, which take a value each.

    None for any other line, which Typer reads.
    """
    if arguments[:1] != [verb] or "_POSTROOM_COMPLETE" in environ:
        return None
    given: dict[str, Any] = {}
    plain, words = [], iter(arguments[1:])
    for word in words:
        if not word.startswith("-"):
            plain.append(word)
        elif word == "--json":
            given["as_json"] = True
        elif (name := options.get(word)) is None or name in given or (value := next(words, "-"))[:1] in {"", "-"}:
            return None
        else:
            given[name] = Path(value) if name in _PATHS else value
    return plain, given


def send_one(
    socket: Path | None,
    to: str,
    content: bytes,
    options: Mapping[str, Any],
    client_message_id: str | None,
    *,
    wait: float | None,
    as_json: bool,
) -> None:
    """Send a message with the `options` of `Client.send`, and, if wanted, wait for its outcome.

    Raises `Fatal` where the broker has not accepted it after the wait, in seconds.
    """
    from postroom import TryAgain, Unavailable  # noqa: PLC0415
    from postroom._wire.transport import find_socket  # noqa: PLC0415

    place = find_socket(socket)  # once: a daemon that is restarted has no socket meanwhile

    def work(client: Client) -> None:
        try:
            result = client.send(to, body_of(content), client_message_id=client_message_id, **options)
        except (TryAgain, Unavailable) as error:
            again = f"then repeat it with --id {error.client_message_id}, which does not send a second message"
            raise advised(error, again) from error
        message_id = result.client_message_id
        if wait is None:
            said = f"{message_id} {result.status}" + (" (duplicate)" if result.duplicate else "")
            json_line(result) if as_json else line(said)
            return
        try:
            row = with_daemon(place, lambda client: client.wait(message_id, wait), patience=min(wait, RESTARTING))
        except (KeyboardInterrupt, TryAgain, Unavailable):
            how_far = f"`postroom outbox inspect {result.outbox_id}` shows how far it is"
            note(f"{message_id} is kept, and the daemon keeps trying: {how_far}")
            raise
        json_line(row) if as_json else line(f"{message_id} {row.status}")
        if row.status in {"dead", "aborted"}:
            why = row.last_error or "an operator retired it"
            raise Fatal(Exit.FAILED, f"{message_id} is {row.status}: {why}; see `postroom trace {row.id}`")
        if row.status != "done":
            raise Fatal(Exit.TRY_AGAIN, f"{message_id} is kept and still {row.status}: see `postroom trace {row.id}`")

    with_daemon(place, work)


def body_of(data: bytes) -> str | bytes:
    """Return what a message's body is: text where it is UTF-8 without NUL, else bytes."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    return data if "\0" in text else text
