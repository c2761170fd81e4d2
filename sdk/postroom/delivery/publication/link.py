"""A connection to JetStream: publishes batches pipelined and reports what became of each message.

The connection does not come back by itself. One connection stores messages in the order in which they were sent, so
that after a break exactly a beginning of the batch is in the stream; a client that reconnects would send what it still
had in its buffer after a part that was lost on the way.

Many messages for one stream go as an atomic batch (NATS 2.12, ADR-50): the server then syncs once instead of once for
each message. It accepts all of it or nothing. The messages of a batch that it refuses, such as one with a known id, are
sent one by one.

JetStream also publishes an advisory about each call to its API (`Audit`). Only programs that are connected at that time
get it: what happened while this one was not has to be assumed.

A connection has pictures of the server's streams, taken again when they may be out of date: which stream has a subject,
what is no longer in one, and what its consumers have acknowledged.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from secrets import token_hex
from typing import Final, NamedTuple, Self

import msgspec
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import RetentionPolicy, StreamInfo

from postroom.chassis.exits import Fatal
from postroom.chassis.runtime import within
from postroom.delivery.errors import from_nats, mapped
from postroom.delivery.nats import NatsClient, api_subject, connect, connection_of
from postroom.delivery.publication import Denied, Outgoing, Place, Refused, Unanswered
from postroom.delivery.settings import NatsSettings
from postroom.delivery.streams import all_consumers, all_streams, filters_of
from postroom.delivery.subjects import expression_of
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 0.1  # between two checks of the connection
_HEADER_LINE: Final = b"NATS/1.0\r\n"
_LINE_EXTRA: Final = 4  # bytes: a colon, a space, CR and LF
_ATOMIC: Final = range(32, 1001)  # messages of an atomic batch: the server stages each in a file; 1,000 is its limit

_FULL: Final = 0.9  # share of a limit from which on a stream may have deleted messages to make room
_CACHED: Final = 10_000  # subjects
_AGE_MARGIN: Final = timedelta(minutes=1)  # before its age limit, a message counts as gone by age
_EVERYTHING: Final = ">"
_DETAILS: Final = b'{"deleted_details":true}'
_ANSWER_SECONDS: Final = 5.0
MOST_HOLES: Final = 20_000  # that are read at each look; of a stream with more only the floors are known

ADVISORIES: Final = "$JS.EVENT.ADVISORY.API"

# The calls that remove messages from a stream, or may: their words before the stream's name.
_TAKING: Final = (("STREAM", "PURGE"), ("STREAM", "MSG", "DELETE"), ("STREAM", "UPDATE"), ("STREAM", "RESTORE"))

Result = Place | str  # where it is, or why no stream is known to have it


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
    forgets: bool  # what is acknowledged leaves it: a work queue, or an interest stream
    atomic: bool  # it accepts atomic batches
    holes: int  # missing numbers after the first message

    def reach(self, horizon: timedelta) -> timedelta:
        """Return up to which age, within the horizon, a missing message was lost and not deleted by age."""
        if self.max_age_seconds is None:
            return horizon
        return min(horizon, timedelta(seconds=self.max_age_seconds) - _AGE_MARGIN)


class Streams:
    """The streams of a server."""

    def __init__(self) -> None:
        self.pictures: list[StreamPicture] = []
        self.missing: frozenset[str] = frozenset()  # names of those that a cluster could not describe just now
        self._by_subject: dict[str, StreamPicture | None] = {}

    async def refresh(self, js: JetStreamContext) -> None:
        """Take the pictures again; raises `PostroomError`."""
        with mapped("listing the streams", Exception):
            infos, self.missing = await all_streams(js)
        self.pictures = [_picture(info) for info in infos]
        self._by_subject.clear()

    def of(self, subject: str) -> StreamPicture | None:
        """Return the stream that has `subject`; None where none does, or one that is missing does."""
        if subject not in self._by_subject:
            if len(self._by_subject) >= _CACHED:
                self._by_subject.clear()
            found = (picture for picture in self.pictures if picture.subjects.fullmatch(subject))
            self._by_subject[subject] = next(found, None)
        return self._by_subject[subject]


def _picture(info: StreamInfo) -> StreamPicture:
    config, state = info.config, info.state
    assert config.name is not None and info.created is not None  # noqa: S101, PT018 - every server reports them
    return StreamPicture(
        config.name,
        info.created,
        state.first_seq,
        state.last_seq,
        _limit(config.max_msg_size),
        config.max_age or None,
        re.compile(expression_of(*config.subjects or ())),
        _keeps_all(info),
        config.retention in (RetentionPolicy.WORK_QUEUE, RetentionPolicy.INTEREST),
        bool(config.allow_atomic),
        state.num_deleted or 0,
    )


def _keeps_all(info: StreamInfo) -> bool:
    """Return whether no limit but age removes messages from a stream: it is far from all others."""
    config, state = info.config, info.state
    if _limit(config.max_msgs_per_subject) is not None:
        return False
    if config.retention == RetentionPolicy.INTEREST and (state.num_deleted or 0) > MOST_HOLES:
        return False  # which of them were acknowledged cannot be noted
    limits = ((_limit(config.max_bytes), state.bytes), (_limit(config.max_msgs), state.messages))
    return all(most is None or used < _FULL * most for most, used in limits)


def _limit(value: int | None) -> int | None:
    return value if value is not None and value > 0 else None


class Holes(NamedTuple):
    """The missing numbers of a stream, known by its creation: all before the first, and `numbers` after that."""

    created_at: datetime
    first_sequence: int
    numbers: frozenset[int]

    def holds(self, sequence: int) -> bool:
        """Return whether the message of that number is there."""
        return sequence >= self.first_sequence and sequence not in self.numbers


class Floors(NamedTuple):
    """What is acknowledged of a stream, known by its creation.

    By subjects, the number up to which everything is; and the missing numbers after the first message.
    """

    created_at: datetime
    by_filter: dict[str, int]
    first_sequence: int
    gone: tuple[tuple[int, int], ...]  # from and up to, the second one excluded


async def read_holes(js: JetStreamContext, stream: str) -> Holes:
    """Read which numbers are missing; raises `PostroomError`."""
    connection, subject = connection_of(js), api_subject(js, f"STREAM.INFO.{stream}")
    with mapped(f"looking at {stream}"):
        answer = json.loads((await connection.request(subject, _DETAILS, timeout=_ANSWER_SECONDS)).data)
    if "error" in answer:
        detail = f"looking at {stream}: {answer['error'].get('description')}; see `postroom doctor`"
        raise PostroomError.of("nats_error", detail)
    info = StreamInfo.from_response(answer)
    assert info.created is not None  # noqa: S101 - every server reports it
    return Holes(info.created, info.state.first_seq, frozenset(info.state.deleted or ()))


async def read_floors(js: JetStreamContext, stream: str) -> Floors:
    """Read what is acknowledged: what is before the first message, what consumers report, and what is missing.

    A consumer of an interest stream says nothing of the others. Raises `PostroomError`.
    """
    with mapped(f"looking at {stream}", Exception):
        info = await js.stream_info(stream)
        consumers = await all_consumers(js, stream)
    assert info.created is not None  # noqa: S101 - every server reports it
    gone: tuple[tuple[int, int], ...] = ()
    if 0 < (info.state.num_deleted or 0) <= MOST_HOLES:
        holes = await read_holes(js, stream)
        gone = _ranges(holes.numbers) if holes.created_at == info.created else ()
    floors = {_EVERYTHING: max(info.state.first_seq - 1, 0)}
    for consumer in consumers if info.config.retention == RetentionPolicy.WORK_QUEUE else ():
        acknowledged = 0 if consumer.ack_floor is None else consumer.ack_floor.stream_seq
        for subjects in filters_of(consumer.config):
            floors[subjects] = max(floors.get(subjects, 0), acknowledged)
    return Floors(info.created, floors, info.state.first_seq, gone)


def _ranges(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the same numbers as ranges: most missing numbers are adjacent."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = ranges[-1][0], number + 1
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)


class _ApiError(msgspec.Struct):
    description: str = "unknown error"


class _Ack(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _ApiError | None = None
    count: int = 0  # of the messages of an atomic batch


_decode_ack: Final = msgspec.json.Decoder(_Ack).decode


class _Call(msgspec.Struct):
    subject: str = ""


_decode_call: Final = msgspec.json.Decoder(_Call).decode


class Audit:
    """The streams from which messages were removed, by the advisories of one connection; calls `noticed` at each."""

    def __init__(self, noticed: Callable[[], None]) -> None:
        self.hears = False  # whether any advisory came: this program's own calls have some too
        self.before: set[tuple[str, datetime]] = set()  # the streams that existed before, by name and creation
        self._noticed = noticed
        self._streams: set[str] = set()

    async def hear(self, message: Msg) -> None:
        """Read one advisory."""
        self.hears = True
        try:
            call = _decode_call(message.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _log.warning("advisory_unreadable", subject=message.subject)  # no server wrote that
            return
        words = call.subject.partition(".API.")[2].split(".")
        if tuple(words[:-1]) in _TAKING:
            self._streams.add(words[-1])
            self._noticed()

    def take(self, stream: str) -> bool:
        """Return whether messages were removed from `stream` since the last call for it."""
        heard = stream in self._streams
        self._streams.discard(stream)
        return heard


class _Batch:
    def __init__(self, first: int, messages: int) -> None:
        self.first = first  # its number
        self.answers: list[_Ack | None] = [None] * messages
        self.complete = asyncio.Event()
        self._missing = messages

    def answer(self, index: int, ack: _Ack) -> None:
        if self.answers[index] is None:
            self._missing -= 1
        self.answers[index] = ack
        if not self._missing:
            self.complete.set()


class Link:
    """One connection, and the server's streams as seen through it."""

    def __init__(self, client: NatsClient, js: JetStreamContext, ack_seconds: float) -> None:
        self.js = js
        self.streams = Streams()
        self._client = client
        self._ack_seconds = ack_seconds
        self._inbox = client.new_inbox()
        self._sent = 0  # messages: the number of the next
        self._batches: list[_Batch] = []
        self._given: dict[str, int] = {}  # by stream, the last number that it gave a message of this link

    @classmethod
    async def open(cls, settings: NatsSettings, *, name: str, ack_seconds: float) -> Self:
        """Connect, once, and look at the streams; raises `PostroomError`."""
        with mapped("connecting to NATS", Fatal):  # a file that could be read before may be being replaced
            client = await connect(settings, name=name, reconnect=False)
        link = cls(client, client.jetstream(timeout=ack_seconds), ack_seconds)
        try:
            with mapped("connecting to JetStream", Exception):
                await client.subscribe(f"{link._inbox}.*", cb=link._acknowledged)
                await link.streams.refresh(link.js)
        except BaseException:
            await client.close()
            raise
        return link

    @property
    def broken(self) -> bool:
        """Whether the connection was lost."""
        return not self._client.is_connected

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def listen(self, audit: Audit) -> None:
        """Have `audit` hear what is done to the streams from now on; raises `PostroomError`."""
        with mapped("subscribing to advisories about the streams", Exception):
            await self._client.subscribe(ADVISORIES, cb=audit.hear)
            await self._client.flush()
            await self.streams.refresh(self.js)
        audit.before = {(stream.name, stream.created_at) for stream in self.streams.pictures}

    def refusal(self, message: Outgoing) -> str | None:
        """Return why the server would refuse a message in any state; None where it would accept it."""
        stream = self.streams.of(message.subject)
        if stream is None and self.streams.missing:
            names = ", ".join(sorted(self.streams.missing))
            listed = f"no stream that JetStream lists has {message.subject}"
            return Unanswered(f"{listed}, and it cannot list {names} at the moment")
        if stream is None:
            reason = "stream_not_changed or stream_unavailable in the worker's log may say why there is none"
            return f"no stream has the subject {message.subject}: declare one; {reason}"
        lines = sum(len(name) + len(value.encode()) + _LINE_EXTRA for name, value in message.headers.items())
        size = len(_HEADER_LINE) + lines + 2 + len(message.body)  # what the server counts
        most = self._client.max_payload
        if size > most:
            return f"{size} bytes are more than the NATS server allows: raise its max_payload ({most})"
        if stream.max_message_bytes is not None and size > stream.max_message_bytes:
            return f"{size} bytes are more than the stream {stream.name} allows: raise its max_msg_size"
        return None

    async def publish(self, messages: Sequence[Outgoing]) -> list[Result]:
        """Send `messages`, none of which has a `refusal`, in order, and return what became of each.

        As many as a batch may have are sent before the next, and none behind one that JetStream does not answer for.
        """
        results: list[Result] = []
        for begin in range(0, len(messages), _ATOMIC[-1]):
            if not any(type(result) is Unanswered for result in results):  # what is denied holds back no other
                results += await self._publish(messages[begin : begin + _ATOMIC[-1]])
        return results + [Unanswered("what goes before it was not acknowledged")] * (len(messages) - len(results))

    async def _publish(self, messages: Sequence[Outgoing]) -> list[Result]:
        streams, given = [self.streams.of(message.subject) for message in messages], self._given.copy()
        first, is_one = streams[0], streams.count(streams[0]) == len(streams)
        atomic = is_one and len(streams) in _ATOMIC and first is not None and first.atomic
        answers = await self._send_as_one(messages) if atomic else None
        if answers is None:
            answers = await self._send(messages, [message.headers for message in messages], answers=len(messages))
        self._given.update({answer.stream: answer.seq for answer in answers if answer is not None and _is_new(answer)})
        if any(_recreated(answer, stream, given) for answer, stream in zip(answers, streams, strict=True)):
            await self.streams.refresh(self.js)
            streams = [self.streams.of(message.subject) for message in messages]
        return [_result(answer, stream) for answer, stream in zip(answers, streams, strict=True)]

    async def _send_as_one(self, messages: Sequence[Outgoing]) -> Sequence[_Ack | None] | None:
        """Send an atomic batch and return the answers to its messages; None where the server refused all of it."""
        name, count = token_hex(8), len(messages)
        headers = [
            {**message.headers, "Nats-Batch-Id": name, "Nats-Batch-Sequence": str(number)}
            for number, message in enumerate(messages, 1)
        ]
        headers[-1]["Nats-Batch-Commit"] = "1"
        (answer,) = await self._send(messages, headers, answers=1)
        if answer is None:
            return [None] * count
        if answer.error is not None or answer.count != count:
            return None
        return [_Ack(answer.stream, number) for number in range(answer.seq - count + 1, answer.seq + 1)]

    async def _send(
        self, messages: Sequence[Outgoing], headers: Sequence[dict[str, str]], *, answers: int
    ) -> list[_Ack | None]:
        """Send `messages` in order and return the answers to the last of them, None where none came in time."""
        clock, denials = asyncio.get_running_loop().time, self._client.denials
        batch = _Batch(self._sent, answers)
        self._sent += answers
        self._batches.append(batch)
        try:
            for index, (message, lines) in enumerate(zip(messages, headers, strict=True), answers - len(messages)):
                reply = f"{self._inbox}.{batch.first + index}" if index >= 0 else ""
                try:
                    await self._client.publish(message.subject, message.body, reply=reply, headers=lines)
                except Exception as error:  # noqa: BLE001 - after any error, this message and the rest are not sent
                    batch.answer(max(index, 0), _failure(Unanswered(from_nats(error, "publishing").problem.detail)))
                    await self._client.close()
                    break
            deadline = clock() + self._ack_seconds
            while not self.broken and not batch.complete.is_set() and (left := deadline - clock()) > 0:
                await within(min(left, _LOOK_SECONDS), batch.complete)
                if self._client.denials == denials:
                    continue
                for index, message in enumerate(messages[len(messages) - answers :]):  # NATS answers these to nobody
                    if (denied := self._client.denied(message.subject, denials)) is not None:
                        batch.answer(index, _failure(Denied(from_nats(denied, "publishing").problem.detail)))
        finally:
            self._batches.remove(batch)  # a late answer is ignored
        return batch.answers

    async def _acknowledged(self, reply: Msg) -> None:
        number = int(reply.subject.rpartition(".")[2])
        for batch in self._batches:
            if batch.first <= number < batch.first + len(batch.answers):
                # Without data it is the server's own answer: no subscriber has that subject.
                missing = _failure(Unanswered("no stream answers: it was deleted, or JetStream is unreachable"))
                batch.answer(number - batch.first, _decode_ack(reply.data) if reply.data else missing)


def _failure(description: str) -> _Ack:
    return _Ack(error=_ApiError(description))


def _is_new(answer: _Ack) -> bool:
    return answer.error is None and not answer.duplicate


def _recreated(answer: _Ack | None, stream: StreamPicture | None, given: Mapping[str, int]) -> bool:
    """Return whether the picture is of an older stream: a new message has a higher number than all before it.

    `given` has the last number that each stream had given when the message was sent: the picture may be older.
    """
    if answer is None or stream is None or not _is_new(answer):
        return False
    return answer.seq <= max(stream.last_sequence, given.get(stream.name, 0))


def _result(answer: _Ack | None, stream: StreamPicture | None) -> Result:
    if answer is None:
        return Unanswered("JetStream did not acknowledge it")
    if answer.error is not None:
        description = answer.error.description
        if stream is None or isinstance(description, Unanswered):
            return description
        return Refused(f"the stream {stream.name} refuses it ({description}): check its limits and its account's")
    if stream is None or answer.stream != stream.name:
        return Unanswered(f"the stream {answer.stream} stored it, which did not exist before")
    return Place(stream.name, stream.created_at, answer.seq, answer.duplicate)
