"""What an operator does with dead letters: look at, replay and drop them (docs/contract/delivery.md#delivery-51).

The record in Postgres is what is read, and where it is written down what was done: a letter that was replayed or
dropped is so permanently, whatever a stream still holds or is filled with again. Letters without a row (those of
agents, of daemons and of other programs) are read from the stream, and get a row when they are settled.

A replay goes to the original subject under a message id that is derived from the old one, so that a replay that was cut
short and repeated is still one message; it names the consumer that buried it, and every other one lets it pass, so that
consumer has to be there. The letter's row is locked meanwhile: two operators do not replay it both.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import asyncpg
import msgspec
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom._wire.dead_letters import Act, DeadLetter, Letter, LetterCause, LetterFilter, LetterNote, common_error
from postroom.chassis.postgres import Connection
from postroom.delivery.dead_letters.letter import QUERIES, REPLAY_OF, REPLAYED_FOR, columns
from postroom.delivery.dead_letters.stream import StreamedLetter, check_context, read_letters
from postroom.delivery.errors import (
    NATS_ERRORS,
    consumer_gone,
    from_nats,
    letter_elsewhere,
    letter_not_found,
    no_nats,
    no_payload,
)
from postroom.delivery.message import EPOCH, MESSAGE_ID
from postroom.delivery.nats import UNREADABLE, UNREADABLE_SUBJECT
from postroom.delivery.streams import all_streams, covers
from postroom.delivery.subjects import dead_letter_subject, stream_name
from postroom.errors import InvalidMessage

_ROWS: Final = 500  # letters of the record that are read at once
_EPOCH: Final = datetime.fromtimestamp(0, UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_LAST: Final = 2**63 - 1
_START: Final = (datetime.min.replace(tzinfo=UTC), False, 0)
_CURSOR: Final = re.compile(r"(-?[0-9]{1,17})-([01])-([0-9]{1,18})")
_ROW: Final = re.compile(r"[1-9][0-9]{0,17}")
_REPLAY_ID: Final = re.compile(r"(?P<original>.+)~[A-Za-z0-9_-]+\.(?P<number>[0-9]+)")

Log = Callable[[Connection, Act, str, str], Awaitable[None]]
"""Keeps, in the transaction that a connection is in, what was done to a letter, by its id, and why."""


class StoredLetter(NamedTuple):
    """A dead letter where it is kept; `letter` is None where another program put something else into the stream."""

    id: str  # its row in the record, else its stream and its number there
    at: datetime  # since when it is dead
    letter: DeadLetter | None
    row: int | None = None
    streamed: StreamedLetter | None = None  # of a letter without a row

    @property
    def key(self) -> tuple[datetime, bool, int]:
        """Where it is in the order of all letters."""
        if self.streamed is None:
            return self.at, False, self.row or 0
        return self.at, True, self.streamed.sequence

    def matches(self, wanted: LetterFilter, moment: datetime) -> bool:
        """Tell whether the letter is meant, at `moment`."""
        letter = self.letter
        if wanted.ids is not None:
            return self.id in wanted.ids or (letter is not None and letter.message_id in wanted.ids)
        if letter is None:
            return wanted == LetterFilter()
        old_enough = wanted.older_than_seconds is None or letter.died_at <= moment - timedelta(
            seconds=wanted.older_than_seconds
        )
        return (
            old_enough
            and wanted.reason in (None, letter.reason)
            and wanted.consumer in (None, letter.consumer)
            and wanted.error in (None, common_error(letter.last_error))
            and (wanted.subject is None or covers(wanted.subject, letter.original_subject))
        )


class LetterOperations:
    """The dead letters of one context, for an operator; whatever reads them raises `NotFound` for an unknown one."""

    def __init__(
        self,
        connection: Connection,
        js: JetStreamContext | None,
        context: str,
        *,
        actor: str,
        log: Log | None = None,
    ) -> None:
        """Without `js` only the record is read; `log` keeps what is done beside the letter's own note."""
        self._connection = connection
        self._js = js
        self._context = context
        self._actor = actor
        self._log = log
        self._there: set[tuple[str, str]] = set()  # consumers with subjects that they were found to take

    async def find(self, wanted: LetterFilter, *, payloads: bool = False) -> list[StoredLetter]:
        """Return the letters that are meant, oldest first; raises `NotFound` for an id that is none."""
        found, _ = await self.page(wanted, payloads=payloads)
        return found

    async def page(
        self, wanted: LetterFilter, *, payloads: bool = False, cursor: str | None = None, limit: int = sys.maxsize
    ) -> tuple[list[StoredLetter], str | None]:
        """Return `limit` of them from `cursor` on, and where the next page begins, if there is one.

        Where all are named by their rows, nothing else is looked at: many are settled some hundred at a time.
        """
        rows = {int(id_) for id_ in wanted.ids or () if _ROW.fullmatch(id_)}
        if rows and wanted.ids is not None and len(rows) == len(wanted.ids):
            named = await self._connection.fetch(QUERIES["find_letters"], self._context, list(rows), payloads)
            if len(named) == len(rows):
                return sorted(map(_recorded, named), key=lambda stored: stored.key), None
        moment, after = datetime.now(UTC), _START if cursor is None else _place(cursor)
        unrecorded = await self._unrecorded()
        found = [stored for stored in unrecorded if stored.key > after and stored.matches(wanted, moment)]
        seen, most = len(unrecorded), len(found) + (limit if wanted.ids is None else sys.maxsize - len(found))
        at, number = after[0], _LAST if after[1] else after[2]
        while page := await self._connection.fetch(QUERIES["list_letters"], self._context, payloads, at, number, _ROWS):
            seen += len(page)
            found += [stored for stored in map(_recorded, page) if stored.matches(wanted, moment)]
            at, number = page[-1]["died_at"], page[-1]["id"]
            if len(page) < _ROWS or len(found) > most:
                break
            await asyncio.sleep(0)  # decoding them is work, and others wait
        if not seen and cursor is None:
            await self._check_context()
        known = {stored.id for stored in found} | {stored.letter.message_id for stored in found if stored.letter}
        for missing in sorted((wanted.ids or frozenset()) - known) if cursor is None else ():
            raise letter_not_found(missing) if self._js else no_nats(f"looking for the dead letter {missing}")
        found.sort(key=lambda stored: stored.key)
        if len(found) <= limit:
            return found, None
        at, streamed, number = found[limit - 1].key
        return found[:limit], f"{(at - _EPOCH) // _MICROSECOND}-{int(streamed)}-{number}"

    async def causes(self, most: int) -> tuple[list[LetterCause], bool]:
        """Return the causes of the oldest `most` letters, the most frequent first, and whether there are more letters.

        What another program put into the stream has no cause.
        """
        found, more = await self.page(LetterFilter(), limit=most)
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
        """Return what operators did, oldest first."""
        rows = await self._connection.fetch(QUERIES["list_settled"], self._context)
        if not rows:
            await self._check_context()
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
                new_message_id=replay_id(letter) if row["act"] == "replayed" else None,
            )
            notes.append(note)
        return notes

    async def replay(self, stored: StoredLetter, *, why: str) -> str:
        """Send a letter's message again, and settle the letter; returns the new message id.

        Raises `Conflict` where the letter holds no message, or the consumer that it is meant for is gone.
        """
        async with self._settling(stored, "replayed", why) as letter:
            if letter is None or not letter.has_payload:
                raise no_payload(stored.id)
            if self._js is None:
                raise no_nats(f"replaying the dead letter {stored.id}")
            new_id, ours = replay_id(letter), {EPOCH, UNREADABLE, UNREADABLE_SUBJECT}
            kept = [name for name in letter.headers if not name.startswith("Nats-") and name not in ours]
            first_id = letter.headers.get(REPLAY_OF) or letter.message_id
            said = {MESSAGE_ID: new_id, REPLAY_OF: first_id, REPLAYED_FOR: letter.consumer}
            headers = {name: letter.headers[name] for name in kept} | {
                name: text for name, text in said.items() if text
            }
            try:
                await self._check_consumer(self._js, stored.id, letter)
                await self._js.publish(letter.original_subject, letter.data(), headers=headers)
            except NATS_ERRORS as error:
                raise from_nats(error, f"replaying the dead letter {stored.id}") from error
        return new_id

    async def drop(self, stored: StoredLetter, *, why: str) -> None:
        """Settle a letter that nobody will handle; its payload goes."""
        async with self._settling(stored, "dropped", why):
            pass

    async def _check_context(self) -> None:
        """Raise `NotFound` where neither the record nor NATS has ever heard of the context."""
        if self._js is not None and not await self._known():
            await check_context(self._js, self._context)

    async def _known(self) -> set[str]:
        """Return the ids of the letters that the record has, settled ones too."""
        return {row["letter_id"] for row in await self._connection.fetch(QUERIES["list_known"], self._context)}

    async def _unrecorded(self) -> list[StoredLetter]:
        """Return what the stream holds and the record has not; a letter that is there twice counts once."""
        if self._js is None:
            return []
        known = await self._known()
        found = []
        async for streamed in read_letters(self._js, self._context):
            if streamed.letter_id not in known:
                known.add(streamed.letter_id)
                id_ = f"{streamed.stream}/{streamed.sequence}"
                found.append(StoredLetter(id_, streamed.stored_at, streamed.letter, streamed=streamed))
        return found

    async def count_unrecorded(self) -> int:
        """Return how many letters there are without a row."""
        return len(await self._unrecorded())

    @asynccontextmanager
    async def _settling(self, stored: StoredLetter, act: Act, why: str) -> AsyncIterator[DeadLetter | None]:
        """Lend the whole letter, nobody else's meanwhile; it is settled unless the block raises."""
        connection = self._connection
        async with connection.transaction():
            if self._log is not None:
                await self._log(connection, act, stored.id, why)
            if stored.row is None:
                await self._settle_unrecorded(stored, act, why)
                yield stored.letter
                return
            row = await connection.fetchrow(QUERIES["lock_letter"], stored.row)
            if row is None:
                raise letter_not_found(stored.id)
            yield _letter(row)
            await connection.execute(QUERIES["settle"], stored.row, act, self._actor, why)
        if self._js is not None and row["stream"] is not None:
            with suppress(NotFoundError, *NATS_ERRORS):  # where it cannot be taken out of its stream, its age does
                found = await self._js.get_msg(str(row["stream"]), row["stream_sequence"])
                if (found.headers or {}).get(MESSAGE_ID, "").partition("/")[0] == row["letter_id"]:
                    await self._js.delete_msg(str(row["stream"]), row["stream_sequence"])

    async def _settle_unrecorded(self, stored: StoredLetter, act: Act, why: str) -> None:
        streamed = stored.streamed
        assert streamed is not None  # noqa: S101 - what has no row was read from the stream
        if streamed.recorded:
            raise letter_elsewhere(stored.id, "" if stored.letter is None else stored.letter.consumer)
        letter = stored.letter or DeadLetter(
            message_id=None, original_subject=streamed.subject, reason="not_a_dead_letter", attempts=0
        )
        said = columns(self._context, letter)[-1]
        subject = dead_letter_subject(self._context, letter.original_subject)
        row = (self._context, streamed.letter_id, subject, stored.at, said, act, self._actor, why)
        if await self._connection.fetchval(QUERIES["settle_unrecorded"], *row) is None:
            raise letter_not_found(stored.id)

    async def _check_consumer(self, js: JetStreamContext, id_: str, letter: DeadLetter) -> None:
        wanted = letter.consumer, letter.original_subject
        if not letter.consumer or wanted in self._there:  # without one it is another program's, and meant for all
            return
        try:
            stream = await js.find_stream_name_by_subject(letter.original_subject)
            await js.consumer_info(stream, letter.consumer)
        except NotFoundError:
            raise consumer_gone(id_, letter.consumer, letter.original_subject) from None
        self._there.add(wanted)


def _place(cursor: str) -> tuple[datetime, bool, int]:
    place = _CURSOR.fullmatch(cursor)
    try:
        if place is not None:
            return _EPOCH + int(place[1]) * _MICROSECOND, place[2] == "1", int(place[3])
    except OverflowError:
        pass
    raise InvalidMessage.of(
        "invalid_cursor", "that cursor is not one of a list: begin again without one", field="cursor"
    )


def replay_id(letter: DeadLetter) -> str:
    """Derive the message id of a letter's replay: the same each time, another for each further death."""
    message_id = letter.message_id or f"{letter.stream}.{letter.sequence}"
    before = _REPLAY_ID.fullmatch(message_id)
    original, number = (before["original"], int(before["number"])) if before else (message_id, 0)
    return f"{original}~{letter.consumer}.{number + 1}"


def _recorded(row: asyncpg.Record) -> StoredLetter:
    return StoredLetter(str(row["id"]), row["died_at"], _letter(row), row=row["id"])


def _letter(row: asyncpg.Record) -> DeadLetter:
    letter = msgspec.json.decode(row["letter"], type=DeadLetter)
    payload = row.get("payload")
    return letter if payload is None else letter.with_data(payload)


async def count_letters(connection: Connection, js: JetStreamContext | None) -> dict[str, int]:
    """Return how many letters of each context are to be settled, by the name of its stream; raises `PostroomError`.

    Without `js`, those of the record.
    """
    rows = await connection.fetch(QUERIES["count_letters"])
    counts = {stream_name(row["context"], "dlq"): int(row["letters"]) for row in rows}
    if js is None:
        return counts
    suffix = stream_name("any", "dlq").removeprefix("ANY")
    try:
        names = sorted(info.config.name or "" for info in (await all_streams(js)).infos)
    except NATS_ERRORS as error:
        raise from_nats(error, "listing the streams of dead letters") from error
    for name in names:
        if name.endswith(suffix):
            letters = LetterOperations(connection, js, name.removesuffix(suffix).lower(), actor="")
            counts[name] = counts.get(name, 0) + await letters.count_unrecorded()
    return counts
