"""What goes wrong in the inbox, each as a sentence, and SQLite's errors mapped in one place."""

import sqlite3
from functools import partial
from pathlib import Path
from typing import Final

from postroom.chassis.sqlite import is_full
from postroom.chassis.store import Answers
from postroom.errors import InvalidMessage, TryAgain


class Broken(Exception):
    """The file or the disk can no longer be trusted: the inbox has to be closed, and opened anew."""


def from_sqlite(error: Exception) -> Exception:
    """Map an error that leaves the file as it was; what is not SQLite's stays what it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    if is_full(error):
        detail = "the disk is full: nothing was written to the inbox; free some space"
        return TryAgain.of("disk_full", detail, retryable=True)
    return TryAgain.of("inbox_busy", f"the inbox cannot be used now: {error}; try again", retryable=True)


def unavailable(reason: str) -> TryAgain:
    """Answer while there is no inbox to read."""
    detail = (
        f"the inbox is not open ({reason}): sends still work, and what is missing arrives later; see `postroom doctor`"
    )
    return TryAgain.of("inbox_unavailable", detail, retryable=True)


def broken(path: Path, error: Exception) -> Broken:
    """Say that the file failed."""
    return Broken(f"{path} failed: {error}")


def invalid_cursor() -> InvalidMessage:
    """Refuse a cursor that no page gave."""
    return InvalidMessage.of(
        "invalid_cursor", "the cursor is not one that a list returned: begin again without one", field="cursor"
    )


def invalid_event_id() -> InvalidMessage:
    """Refuse an event id that no stream of this daemon gave."""
    detail = "the Last-Event-ID was not issued by this daemon: omit it, or ask for messages `since` a time"
    return InvalidMessage.of("invalid_event_id", detail, field="Last-Event-ID")


ANSWERS: Final = Answers(refused=from_sqlite, unknown=broken, closed=partial(unavailable, "it is being closed"))
