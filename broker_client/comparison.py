"""Comparing what is done here with what the broker's database has, after that came back older than it was.

The features name the database's incarnation. Where it is another one than the done rows were last compared with, they
are looked up, batch by batch, beside the relay. What is not there is missing until an operator sends it again. The same
where the mesh's numbers have gone back, since an older database was put in place and nobody said so.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from broker_client.features import HOUR, recognised_hours
from broker_client.link import BrokerLink
from outbox import Outbox
from postroom._wire.accept import Features
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_RETRY_SECONDS: Final = 5.0  # after a look-up that failed


class Comparison:
    """The daemon's one comparison: `notice` what the broker says it is, and `run` as a task."""

    def __init__(self, outbox: Outbox, link: BrokerLink, *, clock: Callable[[], int]) -> None:
        self._outbox = outbox
        self._link = link
        self._clock = clock
        self._due = asyncio.Event()
        self._due.set()  # one may have been under way before the start

    async def name_of(self, features: Features, last_done: int) -> str | None:
        """Name the database that `features` show, if it is another one than the done rows were compared with.

        `last_done` is the highest number known here before the features were asked for.
        """
        name, given_out = features.incarnation, features.last_history_id
        is_older = given_out is not None and given_out < last_done
        if name is not None and is_older:
            name = f"{name} before {last_done}"
        progress = await self._outbox.comparison()
        if progress is not None and progress.incarnation == name:
            return None
        if is_older:
            advice = "if Postgres was restored from a backup, run `postroom broker restored`"
            _log.error("broker_database_older", last_history_id=given_out, known=last_done, advice=advice)
        return name

    async def begin(self, name: str, features: Features) -> None:
        """Begin to compare with the database of that name.

        Rows are compared as long as their ids are surely recognised; older ones the broker may have swept.
        """
        hours = recognised_hours(features)
        since = 0 if hours is None else self._clock() - hours * HOUR
        if await self._outbox.comparison() is not None:
            _log.warning("broker_database_changed", incarnation=name)
        await self._outbox.begin_comparison(name, since)
        self._due.set()

    async def run(self) -> None:
        """Compare whenever one has begun; ends with its task."""
        while True:
            await self._due.wait()
            self._due.clear()
            while (progress := await self._outbox.comparison()) is not None and not progress.ended:
                try:
                    rows, up_to = await self._outbox.stretch(progress)
                    found, lost = await self._link.compared(rows) if rows else ([], [])
                    await self._outbox.note_compared(progress, up_to, found=found, lost=lost)
                except PostroomError as error:  # the broker cannot be asked, or the disk is full
                    _log.warning("comparison_waits", code=error.code, reason=str(error))
                    await asyncio.sleep(_RETRY_SECONDS)
            if progress is not None and (missing := await self._outbox.missing()).rows:
                _log.error(
                    "messages_missing_at_the_broker",
                    rows=missing.rows,
                    without_payload=missing.without_payload,
                    advice="postroom outbox resend --missing --reason 'the database was restored'",
                )
