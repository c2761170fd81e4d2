"""`postroom`: reads the command line, runs one verb, and turns whatever goes wrong into one sentence and an exit code.

The exit codes are `chassis.exits.Exit`; beside them 130 says that the user pressed Ctrl-C.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

from cli.exits import ending, say, stand_in_for_closed_streams
from cli.message import parse_send, send_one


def main() -> NoReturn:
    """Run the command line and end the process."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; an error is said on standard error."""
    stand_in_for_closed_streams()
    try:
        return call(arguments)
    except BaseException as error:  # noqa: BLE001 - the one place where an error becomes an exit code
        if os.environ.get("POSTROOM_DEBUG") == "1":
            traceback.print_exception(error)
        return say(ending(error))


def call(arguments: list[str]) -> int:
    """Run one command and return the exit code that it chose; raises whatever else ended it."""
    if (brief := parse_send(arguments)) is not None:
        from postroom._wire.message import parse_destination  # noqa: PLC0415

        content = brief.body.encode(errors="surrogateescape")
        to, options = str(parse_destination(brief.to)), {"priority": brief.priority, "reply_to": brief.reply_to}
        send_one(brief.socket, to, content, options, brief.client_message_id, wait=None, as_json=brief.as_json)
        sys.stdout.flush()
        return 0
    if arguments[:1] == ["status"]:
        from cli.installation import parse_status  # noqa: PLC0415

        if (wanted := parse_status(arguments)) is not None:
            from cli.screen import show_status  # noqa: PLC0415

            place, as_json = wanted
            show_status(place, as_json=as_json)
            return 0
    from cli.app import call as call_verb  # noqa: PLC0415 - Typer takes longer to import than such a send takes

    return call_verb(arguments)
