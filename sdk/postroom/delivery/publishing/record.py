"""The record: what JetStream has lost is published again (docs/contract/delivery.md#delivery-21).

A server that loses power may lose the newest messages of a stream, or the whole stream; an operator may purge or delete
one. Whatever was published says in its row into which stream it went (the name, and when that stream was created) and
which number it got, so that comparing with the stream shows what is gone:

    the stream was created at another time      everything that went into the other one
    its last number is smaller than a row's     the newest
    another message has a row's number          the same, where others have published since
    its first number is larger than a row's     it was purged; only where nothing but age takes messages out of it
    it gives a number away a second time        one of the two (the publisher sees that when it settles a claim)

What is gone, is younger than the horizon, and was not settled (which each form of a source knows in its own way)
becomes unpublished again, under the next epoch. The publisher does the rest. A comparison may take for lost what is
there (in a stream made anew a moment ago); then the message is in the stream twice, which is harmless: inboxes know it
by its id, without the epoch.

What a comparison cannot see: messages taken out of a work queue (their absence is how it says that they are done), and
single messages deleted from the middle of another stream. Of the first `WorkQueues` sees what went from Postgres; an
operator has the rest published again by hand.
"""

from collections.abc import Sequence
from datetime import datetime

import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom.delivery.errors import NATS_ERRORS, from_nats
from postroom.delivery.message import MESSAGE_ID
from postroom.delivery.publishing.link import Link
from postroom.delivery.publishing.source import Placed, Search, Source, message_id
from postroom.delivery.publishing.streams import Holes, StreamPicture, read_holes
from postroom.delivery.settings import RecordSettings

_log = structlog.get_logger(__name__)


class Record:
    """Compares streams with what was published into them; one for all publishers of a process."""

    def __init__(self, sources: Sequence[Source], settings: RecordSettings) -> None:
        self.comparisons = 0  # since the start
        self.requeued = dict.fromkeys((source.name for source in sources), 0)
        self.horizon = settings.horizon
        self._sources = sources
        self._compared: dict[str, StreamPicture] = {}
        self._link: Link | None = None  # of the last comparison

    async def compare(self, link: Link) -> int:
        """Make unpublished what the streams have lost; return how many messages that were. Raises `PostroomError`.

        The time is taken before the streams are looked at: what was published by then, they must have. What a stream
        lost with its beginning, or as a whole, may be marked as published only after the look; that is waited for.
        """
        untils = [await source.now() for source in self._sources]
        await link.streams.refresh(link.js)
        pictures = link.streams.pictures
        changed = any(self._made_anew(stream) or self._shortened(stream) for stream in pictures)
        requeued, all_complete = 0, True
        for source, until in zip(self._sources, untils, strict=True):
            complete = not changed or await source.all_marked()
            all_complete = all_complete and complete
            marked = await source.now() if complete else until
            for stream in pictures:
                for search in self._searches(stream, until, marked):
                    requeued += await self._requeue(source, search)
                if link is not self._link or not stream.work_queue:  # which may have more holes than messages
                    # the newest that the server has lost, where others have filled their places before this comparison
                    first = await _first_displaced(link.js, source, stream)
                    if first is not None:
                        place = stream.name, stream.created_at, first - 1
                        requeued += await self._requeue(
                            source, Search("behind_the_end", *place, until - self.horizon, until)
                        )
        if all_complete:
            self._compared.update({stream.name: stream for stream in pictures})
        self._link = link
        self.comparisons += 1
        return requeued

    async def prune(self) -> None:
        """Forget what was published so long ago that nothing asks about it."""
        for source in self._sources:
            await source.prune()

    async def _requeue(self, source: Source, search: Search) -> int:
        found = await source.requeue_lost(search)
        if found:
            _log.warning(f"stream_{search.loss}", source=source.name, stream=search.stream, requeued=found)
        self.requeued[source.name] += found
        return found

    def _searches(self, stream: StreamPicture, until: datetime, marked: datetime) -> list[Search]:
        """Return the searches that may find something."""
        place, since = (stream.name, stream.created_at), until - self.horizon
        searches = [Search("behind_the_end", *place, stream.last_sequence, since, until)]
        if self._made_anew(stream):
            searches.append(Search("of_another_stream", *place, 0, since, marked))
        if self._shortened(stream):
            since = until - stream.reach(self.horizon)
            searches.append(Search("before_the_beginning", *place, stream.first_sequence, since, marked))
        return searches

    def _made_anew(self, stream: StreamPicture) -> bool:
        before = self._compared.get(stream.name)
        return before is None or before.created_at != stream.created_at

    def _shortened(self, stream: StreamPicture) -> bool:
        """Tell whether a stream begins elsewhere than it did, and not because it was full."""
        before = self._compared.get(stream.name)
        begins_elsewhere = before is None or before.first_sequence != stream.first_sequence
        return begins_elsewhere and stream.keeps_all and not stream.work_queue


async def _first_displaced(js: JetStreamContext, source: Source, stream: StreamPicture) -> int | None:
    """Return the first number that was noted and is another message's now; None where there is none.

    A loss takes the newest of a stream. So up to some number all is there that was published under it, and behind that
    nothing: a bisection finds the border with few looks, and where nothing was lost the first one says so. A number
    without a message says nothing: that was acknowledged, or deleted by hand.
    """
    holes = Holes(stream.created_at, stream.first_sequence, frozenset())

    async def newest_up_to(sequence: int) -> tuple[Placed, bool] | None:
        """Return the newest row up to a number that has any message, and whether it is that message."""
        nonlocal holes
        place = stream.name, stream.created_at, holes.first_sequence, sequence
        while (noted := await source.newest_at(*place, sorted(holes.numbers))) is not None:
            found = await message_id_at(js, stream.name, noted.sequence)
            if found is not None:
                return noted, found == message_id(noted.identity, noted.epoch)
            missing = await read_holes(js, stream.name)  # at once: a work queue has many
            holes = missing._replace(numbers=missing.numbers | {noted.sequence})
            place = stream.name, stream.created_at, holes.first_sequence, sequence
        return None

    end = at = stream.last_sequence
    good, bad = stream.first_sequence - 1, end + 1  # up to `good` all is there that is noted, from `bad` on nothing
    while good < at:
        newest = await newest_up_to(at)
        if newest is None or newest[0].sequence <= good or newest[1]:
            good = at
        else:
            bad = newest[0].sequence
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
