"""What an operator sees of dead letters, and does with them (docs/contract/delivery.md#delivery-51).

Letters are read from the record in Postgres, which also keeps what was done with them: a letter that was replayed or
dropped stays so permanently, even if it is still in a stream or comes there again. Letters without a row (those of
agents, of daemons and of other programs) are read from the stream, and get a row when they are settled.

A replay goes to the original subject under a message id that is derived from the old one, so that a replay that was
interrupted and repeated is still one message. It names the consumer that buried it, and every other consumer skips it,
so that consumer has to exist, and to filter for the subject. The letter's row is locked meanwhile, so that two
operators cannot replay it at once. Where the stream loses it, it is published again from a row of its own
(publication/replays.sql).

Letters are settled in batches: their rows are locked, their messages published pipelined, and those that a stream has
acknowledged settled, in one transaction. A process that is killed in between has settled none of them; the next replay
sends them again under the same ids. That transaction begins its publish before it looks at the streams, so that a
comparison with one that was created again meanwhile has what went into the old one.
"""

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final, NamedTuple

import asyncpg
import msgspec
from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import NotFoundError

from postroom._wire.dead_letters import (
    DEAD_LETTERS,
    DeadLetter,
    Letter,
    LetterCause,
    LetterFilter,
    LetterNote,
    common_error,
)
from postroom._wire.nouns import invalid_cursor
from postroom.chassis.clock import now
from postroom.chassis.postgres import Connection
from postroom.delivery import errors
from postroom.delivery.dead_letters import (
    QUERIES,
    REPLAY_OF,
    REPLAYED_FOR,
    StreamedLetter,
    columns,
    digest_id,
    has_stream,
    printable_id,
    read_letters,
)
from postroom.delivery.message import EPOCH, FIRST_PUBLISHED_AT, MESSAGE_ID
from postroom.delivery.nats import UNREADABLE, UNREADABLE_SUBJECT, ask_api
from postroom.delivery.publication import Outgoing, Place, identifying
from postroom.delivery.publication.postgres import LIMIT, begin_publish, keep_replays
from postroom.delivery.streams import all_streams, covers, filters_of
from postroom.delivery.subjects import dead_letter_subject, is_literal, mesh_named_by, stream_name
from postroom.errors import PostroomError

_ROWS: Final = 500  # letters of the record that are read at once
_GAPS: Final = 20  # parts of a stream that are read one by one
TOGETHER: Final = 50  # letters that are settled in one transaction, with their payloads in memory
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST: Final = 2**63 - 1
_START: Final = (datetime.min.replace(tzinfo=UTC), False, 0)
_ROUNDING: Final = timedelta(milliseconds=1)  # at least that of the time that a stream reports of a message
_CURSOR: Final = re.compile(r"(-?[0-9]{1,17})-([01])-([0-9]{1,18})(?:-([0-9]{1,18})-([0-9]{1,18}))?")
_ROW: Final = re.compile(r"[1-9][0-9]{0,17}")
_PLACE: Final = re.compile(r"(?P<stream>[^/]+)/(?P<sequence>[1-9][0-9]{0,17})")
_SENDABLE: Final = re.compile(r"(?!Nats-)[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # names of headers; a server stores others too
_REPLAY_ID: Final = re.compile(r"(?P<original>.+)~[A-Za-z0-9_-]+\.(?P<number>[0-9]{1,18})")

Log = Callable[[Connection, str, Sequence[str], str], Awaitable[None]]
"""Logs, in the connection's transaction, a verb that was done, the ids of its letters, and the reason."""

Outcome = str | PostroomError | None
"""What became of a letter: the id of its new message, why it is unchanged, or None, where it was settled only."""


class Ends(NamedTuple):
    """The last letters at some moment: of the record, and of the stream."""

    row: int
    sequence: int


class StoredLetter(NamedTuple):
    """A dead letter where it is kept; `letter` is None where another program put something else into the stream."""

    id: str  # its row in the record, else its stream and its number there
    at: datetime  # since when it is dead
    letter: DeadLetter | None
    row: int | None = None
    streamed: StreamedLetter | None = None  # of a letter without a row

    @property
    def known_as(self) -> str:
        """What the record knows it as, also where another has given it a row meanwhile."""
        return self.id if self.streamed is None else self.streamed.letter_id

    @property
    def key(self) -> tuple[datetime, bool, int]:
        """Where it is in the order of all letters."""
        if self.streamed is None:
            return self.at, False, self.row or 0
        return self.at, True, self.streamed.sequence

    def is_within(self, ends: Ends) -> bool:
        """Return whether the letter was there when those were the last ones."""
        if self.streamed is None:
            return (self.row or 0) <= ends.row
        return self.streamed.sequence <= ends.sequence

    def matches(self, wanted: LetterFilter, moment: datetime) -> bool:
        """Return whether the filter selects the letter, at `moment`."""
        letter = self.letter
        if wanted.ids is not None:
            return self.id in wanted.ids or (letter is not None and letter.message_id in wanted.ids)
        if letter is None:
            return wanted == LetterFilter()
        latest = wanted.latest(moment)
        return (
            (latest is None or letter.died_at < latest)
            and wanted.reason in (None, letter.reason)
            and wanted.consumer in (None, letter.consumer)
            and wanted.error in (None, common_error(letter.last_error))
            and (wanted.subject is None or covers(wanted.subject, letter.original_subject))
        )


class StoredPage(NamedTuple):
    """Some letters, oldest first, where the next page begins, if there is one, and why ids name none, by the ids."""

    letters: list[StoredLetter]
    next_cursor: str | None = None
    missing: Mapping[str, PostroomError] = MappingProxyType({})


class LetterOperations:
    """The dead letters of one context, for an operator."""

    def __init__(
        self, connection: Connection, js: JetStreamContext | None, context: str, *, actor: str, log: Log | None = None
    ) -> None:
        """Without `js` only the record is read; `log` keeps what is done in addition to the letter's own note."""
        self._connection = connection
        self._js = js
        self._context = context
        self._actor = actor
        self._log = log
        # Of consumers and subjects of one batch, when the stream was created in which one takes the other; else None.
        self._created: dict[tuple[str, str], datetime | None] = {}

    async def are_known(self) -> bool:
        """Return whether the record has ever had a letter of the context, or NATS has a stream for its messages."""
        if await self._connection.fetchval(QUERIES["is_known"], self._context):
            return True
        return self._js is not None and await has_stream(self._js, self._context)

    async def find(self, wanted: LetterFilter, *, payloads: bool = False) -> list[StoredLetter]:
        """Return the letters that the filter selects, oldest first; raises `NotFound` for an unknown id."""
        page = await self.page(wanted, payloads=payloads)
        for error in page.missing.values():
            raise error
        return page.letters

    async def page(
        self,
        wanted: LetterFilter,
        *,
        payloads: bool = False,
        cursor: str | None = None,
        limit: int = sys.maxsize,
        closed: bool = False,
    ) -> StoredPage:
        """Return `limit` of them from `cursor` on; what ids are missing is said without a cursor.

        Record and stream are read from there on, and only as far as the page goes. Of named letters the record is
        asked for those, and the stream is read where it has others. The pages that follow one that is `closed` have
        no letter that came after it.
        """
        if (named := await self._find_named(wanted.ids or frozenset(), payloads=payloads)) is not None:
            return StoredPage(named)
        moment, found = await now(self._connection), list[StoredLetter]()
        after, ends = (_START, await self._ends() if closed else None) if cursor is None else _place(cursor)
        reading = self._read(after, payloads=payloads)
        if wanted.ids is not None:
            reading = self._read_named(wanted.ids, payloads=payloads)
        async with aclosing(reading) as letters:
            async for stored in letters:
                if (ends is None or stored.is_within(ends)) and stored.matches(wanted, moment):
                    found.append(stored)
                    if len(found) > limit and wanted.ids is None:
                        break
        known = {stored.id for stored in found} | {stored.letter.message_id for stored in found if stored.letter}
        absent = sorted((wanted.ids or frozenset()) - known) if cursor is None else []
        if absent and not self._js:
            raise errors.no_nats(f"looking for the dead letter {absent[0]}")
        known_as = {id_: id_ for id_ in absent}
        async with aclosing(self._read_places(self._places(absent))) as placed:
            known_as |= {stored.id: stored.known_as async for stored, _ in placed}
        missing = await self._missing(known_as)
        if len(found) <= limit:
            return StoredPage(found, None, missing)
        at, streamed, number = found[limit - 1].key
        place = (at - _EPOCH) // _MICROSECOND, int(streamed), number, *(ends or ())
        return StoredPage(found[:limit], "-".join(map(str, place)), missing)

    async def _ends(self) -> Ends:
        """Return the last letters that there are."""
        row, sequence = await self._connection.fetchval(QUERIES["last_letter"]), 0
        if self._js is not None:
            doing = f"reading the dead letters of {self._context}"
            with errors.mapped(doing), suppress(NotFoundError):  # it is created with the first letter
                sequence = (await self._js.stream_info(stream_name(self._context, "dlq"))).state.last_seq
        return Ends(row, sequence)

    async def causes(self, most: int) -> tuple[list[LetterCause], bool]:
        """Return the causes of the oldest `most` letters, the most frequent first, and whether there are more letters.

        Messages that another program put into the stream have no cause.
        """
        found, more, _ = await self.page(LetterFilter(), limit=most)
        causes: dict[tuple[str, str, str], LetterCause] = {}
        for stored in found:
            if (letter := stored.letter) is not None:
                key = letter.reason, letter.consumer, common_error(letter.last_error)
                before = causes.get(key)
                causes[key] = LetterCause(
                    reason=key[0],
                    consumer=key[1],
                    error=key[2],
                    letters=1 if before is None else before.letters + 1,
                    oldest_at=stored.at if before is None else before.oldest_at,
                    example=Letter(id=stored.id, letter=letter.summary()),
                )
        return sorted(causes.values(), key=lambda cause: -cause.letters), more is not None

    async def notes(self) -> list[LetterNote]:
        """Return what operators did last, oldest first."""
        rows = await self._connection.fetch(QUERIES["list_settled"], self._context, LIMIT)
        notes = []
        for row in rows:
            letter = _letter(row)
            note = LetterNote(
                act=row["act"],
                at=row["settled_at"],
                actor=row["settled_by"],
                why=row["why"],
                message_id=letter.message_id,
                original_subject=letter.original_subject,
                reason=letter.reason,
                consumer=letter.consumer,
                new_message_id=replay_id(letter) if row["act"] in SENT_AGAIN else None,
            )
            notes.append(note)
        return notes

    async def settle(self, verb: str, some: Sequence[StoredLetter], *, why: str) -> dict[str, Outcome]:
        """Do a verb to letters, which settles them and deletes their payloads; return what became of each, by its id.

        That is one transaction, with their payloads in memory: give it `TOGETHER` of them at most.
        """
        connection, outcomes, act = self._connection, dict[str, Outcome](), DEAD_LETTERS.verbs[verb].done
        async with connection.transaction():
            numbers = [stored.row for stored in some if stored.row is not None]
            rows = {str(row["id"]): row for row in await connection.fetch(QUERIES["lock_letters"], numbers)}
            taken = {id_: _letter(row) for id_, row in rows.items()} | await self._record(act, some, why)
            for stored in some:
                if stored.streamed is not None and stored.streamed.recorded:
                    consumer = "" if stored.letter is None else stored.letter.consumer
                    outcomes[stored.id] = errors.letter_elsewhere(stored.id, consumer)
            late = [stored for stored in some if stored.id not in taken.keys() | outcomes.keys()]
            outcomes |= await self._missing({stored.id: stored.known_as for stored in late})
            send = EFFECTS[verb]
            outcomes |= dict.fromkeys(taken) if send is None else await send(self, taken)
            done = [id_ for id_ in taken if not isinstance(outcomes[id_], PostroomError)]
            settled = [rows[id_] for id_ in done if id_ in rows]
            await connection.execute(QUERIES["settle"], [row["id"] for row in settled], act, self._actor, why)
            kept = [stored.streamed for stored in some if stored.id in taken and stored.id not in done]
            forgotten = [streamed.letter_id for streamed in kept if streamed is not None]
            await connection.execute(QUERIES["forget_unrecorded"], self._context, forgotten)
            if self._log is not None:
                await self._log(connection, verb, done, why)
        if (js := self._js) is not None:
            await asyncio.gather(*(_take_out(js, row) for row in settled if row["stream"] is not None))
        return outcomes

    async def _record(self, act: str, some: Sequence[StoredLetter], why: str) -> dict[str, DeadLetter | None]:
        """Insert settled rows for letters without one, which locks them; return those that had none."""
        unrecorded = {
            stored.streamed.letter_id: stored
            for stored in reversed(some)  # of one that is there twice the first counts
            if stored.streamed is not None and not stored.streamed.recorded
        }
        columns_ = []
        for letter_id, stored in sorted(unrecorded.items()):
            assert stored.streamed is not None  # noqa: S101 - as above
            letter = stored.letter or DeadLetter(
                message_id=None, original_subject=stored.streamed.subject, reason="not_a_dead_letter", attempts=0
            )
            subject = dead_letter_subject(self._context, letter.original_subject)
            columns_.append((letter_id, subject, stored.at, columns(self._context, letter)[-1]))
        if not columns_:
            return {}
        rows = await self._connection.fetch(
            QUERIES["settle_unrecorded"], self._context, *map(list, zip(*columns_, strict=True)), act, self._actor, why
        )
        found = [unrecorded[row["letter_id"]] for row in rows]
        return {stored.id: stored.letter for stored in found}

    async def replay(self, letters: Mapping[str, DeadLetter | None]) -> dict[str, Outcome]:
        """Send the messages of letters again, pipelined; return for each its new id, or why no stream has it."""
        outcomes, ready = dict[str, Outcome](), dict[str, tuple[DeadLetter, datetime]]()
        await begin_publish(self._connection)
        self._created.clear()  # a stream may be another one by now
        for id_, letter in letters.items():
            try:
                ready[id_] = await self._check_replay(id_, letter)
            except PostroomError as error:
                outcomes[id_] = error
        sent = await asyncio.gather(*(self._publish(id_, *checked) for id_, checked in ready.items()))
        await keep_replays(self._connection, self._context, [one for one in sent if not isinstance(one, PostroomError)])
        new_ids = [one if isinstance(one, PostroomError) else str(one[0].key) for one in sent]
        return outcomes | dict(zip(ready, new_ids, strict=True))

    async def _check_replay(self, id_: str, letter: DeadLetter | None) -> tuple[DeadLetter, datetime]:
        """Return a letter that can be replayed, and when the stream was created that takes it; raise why it cannot."""
        if letter is None or not letter.has_payload:
            raise errors.no_payload(id_)
        if self._js is None:
            raise errors.no_nats(f"replaying the dead letter {id_}")
        # Whoever may write into the stream could else have an operator of this mesh publish into any other.
        foreign = _ROW.fullmatch(id_) is None and mesh_named_by(letter.original_subject) not in (None, self._context)
        if foreign or not is_literal(letter.original_subject):
            raise errors.not_of_mesh(id_, letter.original_subject, self._context)
        wanted = letter.consumer, letter.original_subject
        if wanted not in self._created:
            try:
                stream, filters = await self._js.find_stream_name_by_subject(letter.original_subject), [">"]
                if letter.consumer:  # without one it is another program's, for all consumers
                    filters = filters_of((await self._js.consumer_info(stream, letter.consumer)).config)
                created = (await self._js.stream_info(stream)).created
            except (NotFoundError, ValueError):  # no consumer may have a name that nats-py refuses
                self._created[wanted] = None
            except errors.NATS_ERRORS as error:
                raise errors.from_nats(error, f"replaying the dead letter {id_}") from error
            else:
                takes = any(covers(pattern, letter.original_subject) for pattern in filters)
                self._created[wanted] = created if takes else None
        if (stream_created_at := self._created[wanted]) is None:
            raise errors.consumer_gone(id_, letter.consumer, letter.original_subject)
        return letter, stream_created_at

    async def _publish(
        self, id_: str, letter: DeadLetter, stream_created_at: datetime
    ) -> tuple[Outgoing, Place] | PostroomError:
        assert self._js is not None  # noqa: S101 - that was checked
        new_id, ours = replay_id(letter), {EPOCH, UNREADABLE, UNREADABLE_SUBJECT}
        kept = [name for name in letter.headers if _SENDABLE.fullmatch(name) and name not in ours]
        first_id = letter.headers.get(REPLAY_OF) or letter.message_id
        published_at = "" if letter.published_at == _EPOCH else letter.published_at.isoformat()
        first_at = letter.headers.get(FIRST_PUBLISHED_AT) or published_at
        said = {REPLAY_OF: first_id, REPLAYED_FOR: letter.consumer, FIRST_PUBLISHED_AT: first_at}
        headers = {name: letter.headers[name] for name in kept} | {name: text for name, text in said.items() if text}
        message = Outgoing(new_id, new_id, 1, 0, letter.original_subject, letter.data(), headers)
        try:
            ack = await self._js.publish(message.subject, message.body, headers=headers | identifying(new_id, 0))
        except errors.NATS_ERRORS as error:
            return errors.from_nats(error, f"replaying the dead letter {id_}")
        return message, Place(ack.stream, stream_created_at, ack.seq, duplicate=bool(ack.duplicate))

    async def _find_named(self, ids: frozenset[str], *, payloads: bool) -> list[StoredLetter] | None:
        """Return the letters that are named by their places, in the record or in the stream; None where some are not.

        This is fast for a client that settles many letters, some hundred at a time.
        """
        places = self._places(ids)
        rows = [int(id_) for id_ in ids if _ROW.fullmatch(id_)]
        if not ids or len(rows) + len(places) < len(ids):
            return None
        named = await self._find_recorded(ids, payloads=payloads)
        async with aclosing(self._read_places(places)) as streamed:
            named += [stored async for stored, known in streamed if not known]
        return sorted(named, key=lambda stored: stored.key) if len(named) == len(ids) else None

    async def _find_recorded(self, ids: frozenset[str], *, payloads: bool) -> list[StoredLetter]:
        """Return the letters of the record with these numbers, or of these messages."""
        rows = [int(id_) for id_ in ids if _ROW.fullmatch(id_)]
        messages = list(map(printable_id, ids))
        found = await self._connection.fetch(QUERIES["find_letters"], self._context, rows, messages, payloads)
        return list(map(_recorded, found))

    async def _read_named(self, ids: frozenset[str], *, payloads: bool) -> AsyncGenerator[StoredLetter, None]:
        """Yield all letters that may be meant, oldest first: of a stream, which has no index, each without a row."""
        found = await self._find_recorded(ids, payloads=payloads)
        doing = f"reading the dead letters of {self._context}"
        if self._js is not None:
            with errors.mapped(doing), suppress(NotFoundError):  # it is created with the first letter
                info = await self._js.stream_info(stream_name(self._context, "dlq"))
                for first, last in await self._unrecorded_parts(info):
                    found += [stored async for stored, known in self._read_stream(first, last) if not known]
        once = {stored.known_as: stored for stored in reversed(found)}
        for stored in sorted(once.values(), key=lambda stored: stored.key):
            yield stored

    def _places(self, ids: Collection[str]) -> dict[str, int]:
        """Return the numbers of the letters that are named by their places in the stream."""
        stream = stream_name(self._context, "dlq")
        places = {id_: place for id_ in ids if (place := _PLACE.fullmatch(id_)) and place["stream"] == stream}
        return {id_: int(place["sequence"]) for id_, place in places.items()}

    async def _missing(self, known_as: Mapping[str, str]) -> dict[str, PostroomError]:
        """Return why ids name no letter, by what the record knows each as: what was done with it, or that none is."""
        if not known_as:
            return {}
        names = list(known_as.values())
        rows = [int(name) for name in names if _ROW.fullmatch(name)]
        settled: dict[str, tuple[str, str, datetime]] = {}
        for *own, act, actor, at in await self._connection.fetch(QUERIES["find_settled"], self._context, rows, names):
            settled |= dict.fromkeys(own, (act, actor, at))
        return {
            id_: errors.letter_settled(id_, *settled[name]) if name in settled else errors.letter_not_found(id_)
            for id_, name in known_as.items()
        }

    async def _read(self, after: tuple[datetime, bool, int], *, payloads: bool) -> AsyncGenerator[StoredLetter, None]:
        """Yield the letters after a place in the order of all of them; reads the stream no further than needed."""
        begin = max(after[0], _EPOCH + _ROUNDING) - _ROUNDING
        async with (
            aclosing(self._read_record(after, payloads=payloads)) as recorded,
            aclosing(self._read_stream(begin)) as streamed,
        ):
            in_record, in_stream = await anext(recorded, None), await anext(streamed, None)
            while in_record is not None or in_stream is not None:
                if in_stream is None or (in_record is not None and in_record.key < in_stream[0].key):
                    assert in_record is not None  # noqa: S101 - one of them is there
                    yield in_record
                    in_record = await anext(recorded, None)
                    continue
                stored, known = in_stream
                if stored.key > after and not known:
                    yield stored
                in_stream = await anext(streamed, None)

    async def _read_record(
        self, after: tuple[datetime, bool, int], *, payloads: bool
    ) -> AsyncGenerator[StoredLetter, None]:
        at, number = after[0], _LAST if after[1] else after[2]
        while page := await self._connection.fetch(QUERIES["list_letters"], self._context, payloads, at, number, _ROWS):
            for row in page:
                yield _recorded(row)
            if len(page) < _ROWS:
                return
            at, number = page[-1]["died_at"], page[-1]["id"]
            await asyncio.sleep(0)  # decoding them takes time, and other tasks wait

    async def _read_stream(
        self, begin: datetime | int, last: int = sys.maxsize
    ) -> AsyncGenerator[tuple[StoredLetter, bool], None]:
        """Yield the letters of the stream from a time or a number on, up to one, and whether the record has them too.

        A letter that is there twice counts as known the second time.
        """
        if self._js is None:
            return
        seen = set[str]()
        async with aclosing(read_letters(self._js, self._context, begin, last)) as pages:
            async for page in pages:
                ids = [one.letter_id for one in page]
                rows = await self._connection.fetch(QUERIES["list_known"], self._context, ids)
                seen |= {row["letter_id"] for row in rows}
                for one in page:
                    id_, known = f"{one.stream}/{one.sequence}", one.letter_id in seen
                    seen.add(one.letter_id)
                    yield StoredLetter(id_, one.stored_at, one.letter, streamed=one), known

    async def _read_places(self, places: Mapping[str, int]) -> AsyncGenerator[tuple[StoredLetter, bool], None]:
        """Yield those of the stream under these ids, and whether the record has them too."""
        if places:
            async with aclosing(self._read_stream(min(places.values()), max(places.values()))) as streamed:
                async for stored, known in streamed:
                    if stored.id in places:
                        yield stored, known

    async def _unrecorded_parts(self, info: StreamInfo) -> list[tuple[int, int]]:
        """Return from which to which number the stream of letters may have some without a row; few parts."""
        stream = info.config.name, info.created, info.state.first_seq, info.state.last_seq
        if await self._connection.fetchval(QUERIES["count_placed"], *stream) == info.state.messages:
            return []
        gaps = await self._connection.fetch(QUERIES["find_gaps"], *stream, _GAPS + 1)
        return [(first, last) for first, last in gaps] if len(gaps) <= _GAPS else [stream[2:]]

    async def count_unrecorded(self, info: StreamInfo) -> int:
        """Return how many letters of the stream have no row."""
        parts = await self._unrecorded_parts(info)
        return sum([not known for first, last in parts async for _, known in self._read_stream(first, last)])


EFFECTS: Final = MappingProxyType({"replay": LetterOperations.replay, "drop": None})
"""How each verb sends the messages of letters again before it settles them; None: it does not."""

SENT_AGAIN: Final = frozenset(DEAD_LETTERS.verbs[verb].done for verb, send in EFFECTS.items() if send is not None)
"""The acts after which the message of a letter is under way again, under its `replay_id`."""


async def _take_out(js: JetStreamContext, row: asyncpg.Record) -> None:
    """Delete a settled letter from its stream; where that fails, it stays there until its maximum age."""
    stream, sequence = str(row["stream"]), row["stream_sequence"]
    with suppress(NotFoundError, *errors.NATS_ERRORS):
        found = await js.get_msg(stream, sequence)
        if (found.headers or {}).get(MESSAGE_ID, "").partition("/")[0] == row["letter_id"]:
            # Without overwriting it: on a server that always syncs, that takes longer than the rest of a replay.
            request = msgspec.json.encode({"seq": sequence, "no_erase": True})
            await ask_api(js, f"STREAM.MSG.DELETE.{stream}", request)


def _place(cursor: str) -> tuple[tuple[datetime, bool, int], Ends | None]:
    place = _CURSOR.fullmatch(cursor)
    try:
        if place is not None:
            ends = None if place[4] is None else Ends(int(place[4]), int(place[5]))
            return (_EPOCH + int(place[1]) * _MICROSECOND, place[2] == "1", int(place[3])), ends
    except OverflowError:
        pass
    raise invalid_cursor()


def replay_id(letter: DeadLetter) -> str:
    """Derive the message id of a letter's replay: the same each time, and another one after each further death."""
    message_id = letter.message_id or f"{letter.stream}.{letter.sequence}"
    before = _REPLAY_ID.fullmatch(message_id)
    original, number = (before["original"], int(before["number"])) if before else (message_id, 0)
    new_id = f"{original}~{letter.consumer}.{number + 1}"
    return digest_id(new_id) if " " in new_id else printable_id(new_id)  # no inbox takes an id with a space


def _recorded(row: asyncpg.Record) -> StoredLetter:
    return StoredLetter(str(row["id"]), row["died_at"], _letter(row), row=row["id"])


def _letter(row: asyncpg.Record) -> DeadLetter:
    letter = msgspec.json.decode(row["letter"], type=DeadLetter)
    payload = row.get("payload")
    return letter if payload is None else letter.with_data(payload)


async def count_letters(connection: Connection, js: JetStreamContext | None) -> dict[str, int]:
    """Return how many unsettled letters each context has, by the name of its stream; raises `PostroomError`.

    Without `js`, only those of the record. Of a stream, what lies between the letters that the record has is read: with
    all of many that takes seconds.
    """
    rows = await connection.fetch(QUERIES["count_letters"])
    counts = {stream_name(row["context"], "dlq"): int(row["letters"]) for row in rows}
    if js is None:
        return counts
    suffix = stream_name("any", "dlq").removeprefix("ANY")
    with errors.mapped("listing the streams of dead letters"):
        streams = {info.config.name or "": info for info in (await all_streams(js)).infos}
    for name, info in sorted(streams.items()):
        if not name.endswith(suffix):
            continue
        letters = LetterOperations(connection, js, name.removesuffix(suffix).lower(), actor="")
        counts[name] = counts.get(name, 0) + await letters.count_unrecorded(info)
    return counts
