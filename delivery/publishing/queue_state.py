"""What a server says of one stream: which numbers are no longer in it, and what its consumers have acknowledged."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Final, NamedTuple

from nats.js.api import StreamInfo

from delivery.errors import from_nats
from delivery.publishing.link import Link
from delivery.streams import all_consumers
from postroom.errors import PostroomError

_EVERYTHING: Final = ">"
_DETAILS: Final = b'{"deleted_details":true}'


class Holes(NamedTuple):
    """A stream by its creation: what is before its first number is not in it, nor what has one of these behind that."""

    created_at: datetime
    first_sequence: int
    numbers: frozenset[int]

    def holds(self, sequence: int) -> bool:
        """Tell whether the message of that number is there."""
        return sequence >= self.first_sequence and sequence not in self.numbers


class Floors(NamedTuple):
    """A stream by its creation: up to which number all is acknowledged, by the subjects for which that holds."""

    created_at: datetime
    by_filter: dict[str, int]


async def read_holes(link: Link, stream: str) -> Holes:
    """Ask which numbers are missing; raises `PostroomError`."""
    answer = json.loads(await link.call(f"STREAM.INFO.{stream}", _DETAILS))
    if "error" in answer:
        raise PostroomError.of(502, "nats_error", f"looking at {stream}: {answer['error'].get('description')}")
    info = StreamInfo.from_response(answer)
    assert info.created is not None  # noqa: S101 - every server tells it
    return Holes(info.created, info.state.first_seq, frozenset(info.state.deleted or ()))


async def read_floors(link: Link, stream: str) -> Floors:
    """Ask what is acknowledged: what is before the first message, and what each consumer says of its own subjects.

    Raises `PostroomError`.
    """
    try:
        info = await link.js.stream_info(stream)
        consumers = await all_consumers(link.js, stream)
    except Exception as error:
        raise from_nats(error, f"looking at {stream}") from error
    assert info.created is not None  # noqa: S101 - every server tells it
    floors = {_EVERYTHING: max(info.state.first_seq - 1, 0)}
    for consumer in consumers:
        acknowledged = 0 if consumer.ack_floor is None else consumer.ack_floor.stream_seq
        for subjects in consumer.config.filter_subjects or [consumer.config.filter_subject or _EVERYTHING]:
            floors[subjects] = max(floors.get(subjects, 0), acknowledged)
    return Floors(info.created, floors)
