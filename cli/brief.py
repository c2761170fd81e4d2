"""The command line of `postroom send TO BODY`, read without Typer, since programs run it for each of their messages.

Only what is plainly such a send: whatever else a line has, and every mistake in it, is Typer's (`cli/send.py`), which
explains it. A test reads the same lines both ways.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

_OPTIONS: Final = {
    "--id": "client_message_id",
    "--priority": "priority",
    "--reply-to": "reply_to",
    "--socket": "socket",
}
PRIORITIES: Final = ("now", "next", "low")


class BriefSend(NamedTuple):
    """One message from the command line, and how to say what became of it."""

    to: str
    body: str
    client_message_id: str | None = None
    priority: str = "next"
    reply_to: str | None = None
    socket: Path | None = None
    as_json: bool = False


def parse_send(arguments: list[str], environ: Mapping[str, str] = os.environ) -> BriefSend | None:
    """Read `send TO BODY` with the options that are usual; None for any other line."""
    if arguments[:1] != ["send"] or "_POSTROOM_COMPLETE" in environ:
        return None
    given: dict[str, Any] = {}
    as_json, plain, words = False, [], iter(arguments[1:])
    for word in words:
        if not word.startswith("-"):
            plain.append(word)
        elif word == "--json":
            as_json = True
        elif word not in _OPTIONS or _OPTIONS[word] in given or (value := next(words, "-"))[:1] in {"", "-"}:
            return None
        else:
            given[_OPTIONS[word]] = Path(value) if word == "--socket" else value
    if len(plain) != 2 or "" in plain or given.get("priority", "next") not in PRIORITIES:  # noqa: PLR2004 - TO, BODY
        return None
    to, body = plain
    return BriefSend(to, body, as_json=as_json, **given)
