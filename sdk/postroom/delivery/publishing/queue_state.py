"""What a server says of one stream: which numbers are no longer in it, and what its consumers have acknowledged."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Final, NamedTuple

from nats.js import JetStreamContext
from nats.js.api import StreamInfo

from postroom.delivery.errors import NATS_ERRORS, from_nats
from postroom.delivery.nats_client import api_subject, connection_of
from postroom.delivery.publishing.link import Link
from postroom.delivery.streams import all_consumers
from postroom.errors import PostroomError

_EVERYTHING: Final = ">"
_DETAILS: Final = b'{"deleted_details":true}'
_ANSWER_SECONDS: Final = 5.0
MOST_HOLES: Final = 20_000  # that are asked for at each look; of a stream with more only the floors are known


class Holes(NamedTuple):
    """A stream by its creation: what is before its first number is not in it, nor what has one of these behind that."""

    created_at: datetime
    first_sequence: int
    numbers: frozenset[int]

    def holds(self, sequence: int) -> bool:
        """Tell whether the message of that number is there."""
        return sequence >= self.first_sequence and sequence not in self.numbers


class Floors(NamedTuple):
    """What is acknowledged of a stream, by its creation.

    Up to a number all is, by the subjects for which that holds; and behind the first message each number that is gone.
    """

    created_at: datetime
    by_filter: dict[str, int]
    first_sequence: int
    gone: tuple[tuple[int, int], ...]  # from and up to, the second one excluded


async def read_holes(js: JetStreamContext, stream: str) -> Holes:
    """Ask which numbers are missing; raises `PostroomError`."""
    connection, subject = connection_of(js), api_subject(js, f"STREAM.INFO.{stream}")
    try:
        answer = json.loads((await connection.request(subject, _DETAILS, timeout=_ANSWER_SECONDS)).data)
    except NATS_ERRORS as error:
        raise from_nats(error, f"looking at {stream}") from error
    if "error" in answer:
        raise PostroomError.of("nats_error", f"looking at {stream}: {answer['error'].get('description')}")
    info = StreamInfo.from_response(answer)
    assert info.created is not None  # noqa: S101 - every server tells it
    return Holes(info.created, info.state.first_seq, frozenset(info.state.deleted or ()))


async def read_floors(link: Link, stream: str) -> Floors:
    """Ask what is acknowledged: what is before the first message, what consumers say of their subjects, what is gone.

    Raises `PostroomError`.
    """
    try:
        info = await link.js.stream_info(stream)
        consumers = await all_consumers(link.js, stream)
    except Exception as error:
        raise from_nats(error, f"looking at {stream}") from error
    assert info.created is not None  # noqa: S101 - every server tells it
    gone: tuple[tuple[int, int], ...] = ()
    if 0 < (info.state.num_deleted or 0) <= MOST_HOLES:
        holes = await read_holes(link.js, stream)
        gone = _ranges(holes.numbers) if holes.created_at == info.created else ()
    floors = {_EVERYTHING: max(info.state.first_seq - 1, 0)}
    for consumer in consumers:
        acknowledged = 0 if consumer.ack_floor is None else consumer.ack_floor.stream_seq
        for subjects in consumer.config.filter_subjects or [consumer.config.filter_subject or _EVERYTHING]:
            floors[subjects] = max(floors.get(subjects, 0), acknowledged)
    return Floors(info.created, floors, info.state.first_seq, gone)


def _ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the same numbers as ranges: most of what is gone lies side by side."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)
