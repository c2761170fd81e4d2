"""The server's streams: which takes a subject, what is no longer in one, and what its consumers have acknowledged.

The pictures are taken anew when they may be out of date.
"""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StreamInfo

from postroom.delivery.errors import NATS_ERRORS, from_nats
from postroom.delivery.nats import api_subject, connection_of
from postroom.delivery.streams import all_consumers, all_streams
from postroom.errors import PostroomError

_FULL: Final = 0.9  # of its limit, from where on a stream may have made room by itself
_CACHED: Final = 10_000  # subjects
_AGE_MARGIN: Final = timedelta(minutes=1)  # before its age limit, a message counts as gone by age
_EVERYTHING: Final = ">"
_DETAILS: Final = b'{"deleted_details":true}'
_ANSWER_SECONDS: Final = 5.0
MOST_HOLES: Final = 20_000  # that are asked for at each look; of a stream with more only the floors are known


class StreamPicture(NamedTuple):
    """One stream as it was when the picture was taken."""

    name: str
    created_at: datetime
    first_sequence: int
    last_sequence: int
    max_message_bytes: int | None
    max_age_seconds: float | None
    subjects: re.Pattern[str]
    keeps_all: bool  # until they are `max_age_seconds` old: what is missing before the beginning was purged
    work_queue: bool  # acknowledging a message takes it out too
    holes: int  # numbers behind the first message that are gone

    def reach(self, horizon: timedelta) -> timedelta:
        """Return up to which age, within the horizon, a message that is not there was lost and is not just too old."""
        if self.max_age_seconds is None:
            return horizon
        return min(horizon, timedelta(seconds=self.max_age_seconds) - _AGE_MARGIN)


class Streams:
    """The streams of a server."""

    def __init__(self) -> None:
        self.pictures: list[StreamPicture] = []
        self.missing: frozenset[str] = frozenset()  # names of those that a cluster could not tell of just now
        self._by_subject: dict[str, StreamPicture | None] = {}

    async def refresh(self, js: JetStreamContext) -> None:
        """Take the picture anew; raises `PostroomError`."""
        try:
            infos, self.missing = await all_streams(js)
        except Exception as error:
            raise from_nats(error, "listing the streams") from error
        self.pictures = [_picture(info) for info in infos]
        self._by_subject.clear()

    def of(self, subject: str) -> StreamPicture | None:
        """Return the stream that takes `subject`; None where none does, or it is one of those that are missing."""
        if subject not in self._by_subject:
            if len(self._by_subject) >= _CACHED:
                self._by_subject.clear()
            found = (picture for picture in self.pictures if picture.subjects.fullmatch(subject))
            self._by_subject[subject] = next(found, None)
        return self._by_subject[subject]


def _picture(info: StreamInfo) -> StreamPicture:
    config, state = info.config, info.state
    assert config.name is not None and info.created is not None  # noqa: S101, PT018 - every server tells them
    return StreamPicture(
        config.name,
        info.created,
        state.first_seq,
        state.last_seq,
        _limit(config.max_msg_size),
        config.max_age or None,
        subject_pattern(config.subjects or ()),
        _keeps_all(info),
        config.retention == RetentionPolicy.WORK_QUEUE,
        state.num_deleted or 0,
    )


def _keeps_all(info: StreamInfo) -> bool:
    """Tell whether no limit but age takes messages out of a stream: it is far from all others."""
    config, state = info.config, info.state
    if config.retention == RetentionPolicy.INTEREST or _limit(config.max_msgs_per_subject) is not None:
        return False
    limits = ((_limit(config.max_bytes), state.bytes), (_limit(config.max_msgs), state.messages))
    return all(most is None or used < _FULL * most for most, used in limits)


def _limit(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None


def subject_pattern(subjects: Sequence[str]) -> re.Pattern[str]:
    """Return what matches, as a whole, the subjects that one of `subjects` takes, as NATS writes them."""
    words = {"*": r"[^.]+", ">": ".+"}
    return re.compile(
        "|".join(r"\.".join(words.get(word) or re.escape(word) for word in subject.split(".")) for subject in subjects)
    )


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
        raise PostroomError.of(
            "nats_error", f"looking at {stream}: {answer['error'].get('description')}; see `postroom doctor`"
        )
    info = StreamInfo.from_response(answer)
    assert info.created is not None  # noqa: S101 - every server tells it
    return Holes(info.created, info.state.first_seq, frozenset(info.state.deleted or ()))


async def read_floors(js: JetStreamContext, stream: str) -> Floors:
    """Ask what is acknowledged: what is before the first message, what consumers say of their subjects, what is gone.

    Raises `PostroomError`.
    """
    try:
        info = await js.stream_info(stream)
        consumers = await all_consumers(js, stream)
    except Exception as error:
        raise from_nats(error, f"looking at {stream}") from error
    assert info.created is not None  # noqa: S101 - every server tells it
    gone: tuple[tuple[int, int], ...] = ()
    if 0 < (info.state.num_deleted or 0) <= MOST_HOLES:
        holes = await read_holes(js, stream)
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
