"""Sending one message, and saying what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cli.connect import with_daemon
from cli.output import json_line, line, note
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import Client, OutboxRow, PostroomError, SendResult


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
    """Send a message with the `options` of `Client.send`, and, if wanted, wait for what becomes of it."""
    from postroom import TryAgain, Unavailable  # noqa: PLC0415

    def work(client: Client) -> None:
        try:
            result = client.send(to, body_of(content), client_message_id=client_message_id, **options)
        except (TryAgain, Unavailable) as error:
            _refer_to_id(error)
        if wait is None:
            json_line(result) if as_json else line(_receipt(result))
            return
        row = _settled(client, result.client_message_id, wait)
        json_line(row) if as_json else line(f"{row.client_message_id} {row.status}")
        _judge(row)

    with_daemon(socket, work)


def body_of(data: bytes) -> str | bytes:
    """Return what a message's body is: text where it is UTF-8 without NUL, else bytes."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    return data if "\0" in text else text


def _settled(client: Client, message_id: str, seconds: float) -> OutboxRow:
    """Wait for what becomes of the message; whoever ends that with Ctrl-C is told that the message is kept."""
    try:
        return client.wait(message_id, seconds)
    except KeyboardInterrupt:
        what_tells = f"`postroom outbox inspect {message_id}` shows how far it is"
        note(f"{message_id} is kept, and the daemon keeps trying: {what_tells}")
        raise


def _refer_to_id(error: PostroomError) -> NoReturn:
    """Name the id under which a message that may have been kept can be sent again without a second one."""
    from msgspec.structs import replace  # noqa: PLC0415

    sentence = f"{error}; then repeat it with --id {error.client_message_id}, which does not send a second message"
    raise type(error)(replace(error.problem, detail=sentence)) from error


def _receipt(result: SendResult) -> str:
    return f"{result.client_message_id} {result.status}" + (" (duplicate)" if result.duplicate else "")


def _judge(row: OutboxRow) -> None:
    """Raise `Fatal` unless the broker has accepted the message."""
    if row.status == "done":
        return
    if row.status in {"dead", "aborted"}:
        raise Fatal(
            Exit.FAILED, f"{row.client_message_id} is {row.status}: {row.last_error or 'an operator retired it'}"
        )
    raise Fatal(Exit.TRY_AGAIN, f"{row.client_message_id} is kept and still {row.status}: the daemon keeps trying")
