"""Making messages of what stands on the command line and in the lines of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from cli.lines import MAX_LINE
from cli.quantities import time_of

if TYPE_CHECKING:
    from postroom import SendRequest
    from postroom._wire.message import Priority


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


def body_of(data: bytes) -> str | bytes:
    """Return what a message's body is: text where it is UTF-8 without NUL, else bytes."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    return data if "\0" in text else text


def plain_lines(to: str, common: Common, id_prefix: str | None) -> Callable[[bytes, int], SendRequest]:
    """Make the parser for lines that are bodies."""
    from postroom._wire.arguments import compose  # noqa: PLC0415

    def parse(line: bytes, number: int) -> SendRequest:
        _check_length(line)
        return compose(to, body_of(line), **common._asdict(), client_message_id=_id(id_prefix, number))

    return parse


def json_lines(id_prefix: str | None) -> Callable[[bytes, int], SendRequest]:
    """Make the parser for lines that are whole messages, as `POST /v1/send/batch` takes them."""
    from msgspec.structs import replace  # noqa: PLC0415

    from postroom._wire.message import decode_request  # noqa: PLC0415

    def parse(line: bytes, number: int) -> SendRequest:
        _check_length(line)
        message = decode_request(line)
        if message.client_message_id is None and id_prefix is not None:
            return replace(message, client_message_id=_id(id_prefix, number))
        return message

    return parse


def _id(prefix: str | None, number: int) -> str | None:
    """Build the id of a line; such ids sort as their lines do."""
    return None if prefix is None else f"{prefix}-{number:09d}"


def _check_length(line: bytes) -> None:
    from postroom._wire.message import refuse  # noqa: PLC0415

    if len(line) > MAX_LINE:
        refuse("payload_too_large", f"the line has more than {MAX_LINE} bytes", "body")
