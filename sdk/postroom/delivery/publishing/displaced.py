"""What a server lost though its end does not show it: others have published since, and have the numbers now.

A loss takes the newest of a stream. So up to some number all is there that was published under it, and behind that
nothing: a bisection finds the border with few looks, and where nothing was lost the first one says so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import asyncpg
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom.chassis.postgres import Connection
from postroom.delivery.errors import NATS_ERRORS, from_nats
from postroom.delivery.message import MESSAGE_ID
from postroom.delivery.publishing.link import Link
from postroom.delivery.publishing.queue_state import Holes, read_holes
from postroom.delivery.publishing.source import Source, message_id
from postroom.delivery.publishing.streams import StreamPicture


class Noted(NamedTuple):
    """A number under which something was published, and whether the stream still has that there."""

    sequence: int
    there: bool


async def first_displaced(stream: StreamPicture, newest_at: Callable[[int], Awaitable[Noted | None]]) -> int | None:
    """Return the first number that was noted and is another message's now; None where there is none.

    `newest_at` looks at what was noted under a number, or under the next one before it.
    """
    end = at = stream.last_sequence
    good, bad = stream.first_sequence - 1, end + 1  # up to `good` all is there that is noted, from `bad` on nothing
    while good < at:
        noted = await newest_at(at)
        if noted is None or noted.sequence <= good or noted.there:
            good = at
        else:
            bad = noted.sequence
        at = (good + bad) // 2
    return bad if bad <= end else None


async def message_id_at(js: JetStreamContext, stream: str, sequence: int) -> str | None:
    """Return the id of the message that has this number, empty if without; None where there is no message.

    Raises `PostroomError`.
    """
    try:
        found = await js.get_msg(stream, sequence)
    except NotFoundError:
        return None
    except NATS_ERRORS as error:
        raise from_nats(error, f"looking at message {sequence} of {stream}") from error
    return str((found.headers or {}).get(MESSAGE_ID, ""))


class Places:
    """The rows of one source that went into a stream, and what is in their places now.

    A number without a message says nothing: that was acknowledged, or deleted by hand.
    """

    def __init__(self, connection: Connection, link: Link, source: Source, stream: StreamPicture) -> None:
        self._connection = connection
        self._link = link
        self._source = source
        self._stream = stream
        self._holes = Holes(stream.created_at, stream.first_sequence, frozenset())

    async def newest_at(self, sequence: int) -> Noted | None:
        """Look at the newest row up to a number that has any message; raises `PostroomError`."""
        while (row := await self._row(sequence)) is not None:
            identity, epoch, number = row
            found = await message_id_at(self._link.js, self._stream.name, number)
            if found is not None:
                return Noted(number, found == message_id(identity, epoch))
            holes = await read_holes(self._link.js, self._stream.name)  # at once: a work queue has many
            self._holes = holes._replace(numbers=holes.numbers | {number})
        return None

    async def _row(self, sequence: int) -> asyncpg.Record | None:
        bounds = self._holes.first_sequence, sequence, list(self._holes.numbers)
        query = self._source.queries["newest_at"]
        return await self._connection.fetchrow(query, self._stream.name, self._stream.created_at, *bounds)
