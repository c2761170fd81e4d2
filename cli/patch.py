"""Reading the message that `--patch-payload` names: the JSON of one send, without an id."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cli.files import read_plain_file
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom._wire.message import SendRequest


def read_patch(file: Path) -> SendRequest:
    """Return the message in `file`; raises `Fatal` for no plain file, `InvalidMessage` for no message."""
    from postroom._wire.message import decode_request, parse_destination  # noqa: PLC0415

    request = decode_request(read_plain_file(file))
    parse_destination(request.to)
    if request.client_message_id is not None:
        raise Fatal(Exit.USAGE, f"{file} contains a client_message_id: pass the new one with --new-client-id")
    return request
