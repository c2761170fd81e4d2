"""Writing to the event store: a full disk is waited out, any other failure ends the process."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import structlog

from postroom.chassis.exits import Fatal
from postroom.chassis.sqlite import exit_after, is_full

_log = structlog.get_logger(__name__)

_DISK_PAUSE: Final = 1.0  # seconds between two tries to commit on a full disk
T = TypeVar("T")


async def durably(write: Callable[[], Awaitable[T]]) -> T:
    """Call `write` until the disk has room: nothing was written, so nothing else needs to run again.

    Raises `Fatal` (74) where the disk fails.
    """
    while True:
        try:
            return await write()
        except sqlite3.Error as error:
            if not is_full(error):
                raise Fatal(exit_after(error), f"writing the event store failed: {error}; check the disk") from error
            _log.error("disk_full", advice="free some space: the agent waits")
            await asyncio.sleep(_DISK_PAUSE)
