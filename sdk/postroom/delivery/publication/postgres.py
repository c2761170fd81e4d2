"""The Postgres form of a source: events, deliveries, dead letters and their replays are rows of the same kind.

The queries of all tables are written once (rows.sql), in words that each table's own file defines; each table has a
function that makes a message of a row. A claim is one transaction: killed before its end, it leaves its rows
unpublished.

Operators see and change what is not in its stream. What JetStream refuses, since no stream accepts it or it is too
large, holds up its aggregate (of deliveries: its recipient) until an operator removes the cause, and is then published.
What can never be published is dropped: an event or a replay leaves its table and is kept whole, a delivery is noted,
and its message stays in the history; who dropped it, and why, is kept with it.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any, Final

import asyncpg
import msgspec

from postroom._wire.dead_letters import DeadLetter
from postroom._wire.message import read_traceparent
from postroom._wire.moment import EPOCH
from postroom._wire.nouns import Failure
from postroom._wire.sql import Queries, load_queries, read_sql
from postroom._wire.unpublished import (
    Dropped,
    Failing,
    FailingPage,
    PublishedFilter,
    Redriven,
    RefusedFilter,
    SourceBacklog,
)
from postroom.chassis.clock import now
from postroom.chassis.postgres import Connection, Pool, count_changed
from postroom.delivery.dead_letters import LETTER, RECORDED
from postroom.delivery.errors import not_failing, stream_unknown, was_dropped
from postroom.delivery.message import history_message
from postroom.delivery.publication import Failed, Outgoing, Place, Placed, Search, Unanswered, identifying
from postroom.delivery.publication.link import Holes
from postroom.delivery.settings import PublisherSettings, RecordSettings
from postroom.delivery.subjects import expression_of, is_stream_name

QUERIES: Final = load_queries(__package__, "record.sql")
LIMIT: Final = 1000  # that are listed, or that one request drops
_STEP: Final = 5000  # rows of one table that one statement, or one transaction, makes unpublished again
_SET: Final = re.compile(r"^\\set ([a-z]+) (.+)\n", re.MULTILINE)
_WORD: Final = re.compile(r"(?<![:\w]):([a-z]+)\b")
_encode: Final = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Table:
    """One table: its queries, a value that sorts before all its aggregates, and how a row becomes a message."""

    name: str
    queries: dict[str, str]
    lowest: str | int
    outgoing: Callable[[asyncpg.Record], Outgoing]


def _queries(file: str) -> dict[str, str]:
    """Load the queries of all tables in the words of one, and that table's own queries."""
    texts = read_sql(__package__, "rows.sql"), read_sql(__package__, file)
    words = {name: value for text in texts for name, value in _SET.findall(text)}

    def say(text: str) -> str:
        return _WORD.sub(lambda word: say(words[word[1]]), text)

    return {name: say(query) for text in texts for name, query in Queries(text).items()}


def _event(row: asyncpg.Record) -> Outgoing:
    headers = {
        **identifying(row["id"], row["epoch"]),
        "Postroom-Event-Type": row["event_type"],
        "X-Event-Version": str(row["event_version"]),
        "X-Occurred-At": row["occurred_at"].isoformat(),
    }
    for name, value in (
        ("X-Correlation-Id", row["correlation_id"]),
        ("X-Causation-Id", row["causation_id"]),
        ("traceparent", read_traceparent(row["traceparent"])),  # it is the application's, and was not checked before
    ):
        if value is not None:
            headers[name] = str(value)
    return _outgoing(row, row["id"], row["body"].encode(), headers)


def _delivery(row: asyncpg.Record) -> Outgoing:
    headers = {**identifying(row["id"], row["epoch"]), "X-Occurred-At": row["accepted_at"].isoformat()}
    if row["traceparent"] is not None:
        headers["traceparent"] = row["traceparent"]
    key = f"{row['broker_message_id']}.{row['recipient_id']}"
    return _outgoing(row, key, _encode(history_message(row)), headers)


def _letter(row: asyncpg.Record) -> Outgoing:
    letter = msgspec.json.decode(row["letter"], type=DeadLetter)
    headers = {**identifying(row["letter_id"], row["epoch"]), **LETTER, RECORDED: "postgres"}
    outgoing = _outgoing(row, str(row["aggregate"]), _encode(letter.with_data(row["payload"])), headers)
    return outgoing._replace(shorter=_encode(letter.shortened()))


def _replay(row: asyncpg.Record) -> Outgoing:
    headers = msgspec.json.decode(row["headers"], type=dict[str, str])
    headers |= identifying(row["message_id"], row["epoch"])
    return _outgoing(row, str(row["aggregate"]), row["payload"], headers)


def _outgoing(row: asyncpg.Record, key: str, body: bytes, headers: dict[str, str]) -> Outgoing:
    return Outgoing(key, row["aggregate"], row["place"], row["publish_attempts"], row["subject"], body, headers)


EVENTS: Final = Table("events", _queries("events.sql"), "", _event)
DELIVERIES: Final = Table("deliveries", _queries("deliveries.sql"), 0, _delivery)
LETTERS: Final = Table("letters", _queries("letters.sql"), 0, _letter)
REPLAYS: Final = Table("replays", _queries("replays.sql"), 0, _replay)
TABLES: Final = (EVENTS, DELIVERIES, LETTERS, REPLAYS)


class PostgresClaim:
    """Rows of some aggregates, in the transaction that holds them."""

    def __init__(
        self, source: PostgresSource, connection: Connection, messages: Sequence[Outgoing], *, more: bool
    ) -> None:
        self.messages = messages
        self.more = more
        self._source = source
        self._connection = connection

    async def settle(
        self, placed: Sequence[tuple[Outgoing, Place]], gone: Sequence[Outgoing], failed: Sequence[Failed]
    ) -> bool:
        """Note what became of each; see `Claim`."""
        shared = await _mark_published(self._connection, self._source.table, placed, self._source.horizon)
        if gone:
            unsettled = await self._fetch("find_unsettled", [str(one.key) for one in gone])
            await self._fetch("requeue", [row[0] for row in unsettled])
        if failed:
            messages, errors, seconds = zip(*failed, strict=True)
            refusals = [None if isinstance(error, Unanswered) else error for error in errors]
            await self._fetch("mark_failed", [str(one.key) for one in messages], refusals, list(seconds))
        return shared

    async def _fetch(self, query: str, *values: Any) -> list[asyncpg.Record]:
        return await self._connection.fetch(self._source.table.queries[query], *values)


async def _mark_published(
    connection: Connection, table: Table, placed: Sequence[tuple[Outgoing, Place]], horizon: timedelta
) -> bool:
    """Note where messages are; return whether any got a number that another one has."""
    if not placed:
        return False
    streams, created, sequences, _ = zip(*(place for _, place in placed), strict=True)
    values = [str(one.key) for one, _ in placed], list(streams), list(created), list(sequences), horizon
    return bool(await connection.fetch(table.queries["mark_published"], *values))


async def begin_publish(connection: Connection) -> None:
    """Announce that this transaction publishes messages and notes their places: who compares streams waits for it."""
    await connection.execute(QUERIES["begin_publish"])


async def keep_replays(connection: Connection, context: str, sent: Sequence[tuple[Outgoing, Place]]) -> None:
    """Keep the messages of dead letters that were sent again, by their ids, with their places, as published."""
    by_id = {str(message.key): (message, place) for message, place in sent}
    if not by_id:
        return
    columns = ((message.subject, _encode(message.headers), message.body) for message, _ in by_id.values())
    values = map(list, zip(*columns, strict=True))
    placed = []
    for row in await connection.fetch(REPLAYS.queries["keep"], context, list(by_id), *values):
        message, place = by_id[row["message_id"]]
        placed.append((message._replace(key=row["key"]), place))
    await _mark_published(connection, REPLAYS, placed, RecordSettings().horizon)


class PostgresSource:
    """One table of a database, as publisher and record use it."""

    def __init__(self, pool: Pool, table: Table, settings: RecordSettings) -> None:
        self.name = table.name
        self.pool = pool
        self.table = table
        self.horizon = settings.horizon
        self._keep = timedelta(days=settings.keep_days)
        self._after = table.lowest
        self._quiet = False  # the last claim found nothing

    @asynccontextmanager
    async def claim(self, limits: PublisherSettings) -> AsyncIterator[PostgresClaim]:
        """Claim the oldest messages of some aggregates that no other publisher holds.

        Claims go through the aggregates in a circle, so that none is left out. After one that found nothing, the next
        first asks whether anything waits: that is one round trip, and a transaction three.
        """
        queries = self.table.queries
        async with self.pool.acquire() as connection, AsyncExitStack() as held:
            if self._quiet and not await connection.fetchval(queries["waits"]):
                yield PostgresClaim(self, connection, (), more=False)
                return
            await held.enter_async_context(connection.transaction())
            wait = timedelta(seconds=limits.most_seconds)
            found = await connection.fetch(queries["claim_aggregates"], self._after, limits.aggregates, wait)
            more = len(found) == limits.aggregates
            self._after = found[-1]["aggregate"] if more else self.table.lowest
            mine = [row["aggregate"] for row in found if row["claimed"]]
            rows: list[asyncpg.Record] = []
            if mine:
                (bounds,) = await connection.fetch(queries["horizon"], mine) if "horizon" in queries else ((),)
                # A statement of its own reads the rows: its snapshot is later than the locks and the horizon.
                rows = await connection.fetch(queries["claim"], mine, limits.batch, limits.batch_bytes, wait, *bounds)
            self._quiet = not found
            yield PostgresClaim(self, connection, [self.table.outgoing(row) for row in rows], more=more)

    async def backlog(self, context: str | None = None) -> SourceBacklog:
        """Return what waits to be published, of one context or of all."""
        return await _backlog(self.pool, self.table, context)

    async def now(self) -> datetime:
        """Return the time of the database."""
        return await now(self.pool)

    async def all_marked(self) -> bool:
        """Wait briefly for the publishers that have published already."""
        return await all_marked(self.pool)

    async def requeue_lost(self, search: Search) -> int:
        """Make unpublished what a stream has lost."""
        bound = search.created_at if search.loss == "of_another_stream" else search.bound
        bounds = search.stream, bound, search.since, search.until
        async with self.pool.acquire() as connection:
            return await self.requeue(connection, f"find_{search.loss}", *bounds)

    async def requeue_taken_out(self, stream: str, holes: Holes, since: datetime) -> int:
        """Make unpublished what is above the floors of a work queue and no longer in it; return how many that were."""
        bounds = stream, holes.created_at, holes.first_sequence, list(holes.numbers), since
        async with self.pool.acquire() as connection:
            return await self.requeue(connection, "find_taken_out", *bounds)

    async def requeue(self, connection: Connection, find: str, *bounds: Any) -> int:
        """Requeue what a query finds to be lost; it examines some thousand rows at a time, by their places."""
        requeued, after = 0, (0, EPOCH)
        while rows := await connection.fetch(self.table.queries[find], *bounds, _STEP, *after):
            if keys := [row["key"] for row in rows if row["lost"]]:
                await connection.execute(self.table.queries["requeue"], keys)
            requeued += len(keys)
            after = rows[-1]["stream_sequence"], rows[-1]["stream_created_at"]
        return requeued

    async def newest_at(
        self, stream: str, created_at: datetime, first: int, last: int, missing: Sequence[int]
    ) -> Placed | None:
        """Return the message with the highest number of a stream in a range."""
        query = self.table.queries["newest_at"]
        row = await self.pool.fetchrow(query, stream, created_at, first, last, list(missing))
        return None if row is None else Placed(*row)

    async def prune(self) -> None:
        """Delete events older than `keep_days`; letters stay until they are settled, deliveries go with messages."""
        query = self.table.queries.get("prune")
        if query is not None:
            before = await self.now() - self._keep
            while await count_changed(self.pool, query, before, _STEP) == _STEP:
                pass


async def sources_of(pool: Pool, settings: RecordSettings | None = None) -> list[PostgresSource]:
    """Return the sources of a database: deliveries only where it is a broker's."""
    has_broker = await pool.fetchval(DELIVERIES.queries["has_broker"])
    tables = TABLES if has_broker else (EVENTS, LETTERS)
    return [PostgresSource(pool, table, settings or RecordSettings()) for table in tables]


async def all_marked(pool: Pool) -> bool:
    """Wait until what has been published by now is marked so; False where a publisher takes too long."""
    try:
        await pool.execute(QUERIES["await_marks"])
    except asyncpg.LockNotAvailableError:
        return False
    return True


async def declare_subjects(pool: Pool, subjects: Sequence[str]) -> None:
    """Note that a stream is declared for these: `postroom.emit` accepts them though no mesh has their name."""
    if subjects:
        await pool.execute(QUERIES["declare_subjects"], list(subjects), [expression_of(one) for one in subjects])


async def is_declared(connection: Connection, context: str) -> bool:
    """Return whether a stream is declared for subjects of a context."""
    declared: bool = await connection.fetchval(QUERIES["is_declared"], context)
    return declared


async def list_failing(connection: Connection, table: Table, context: str | None = None) -> FailingPage:
    """Return the oldest rows of a table that are refused, of one context or of all."""
    rows = await connection.fetch(table.queries["list_failing"], context, LIMIT + 1)
    return FailingPage(failing=[Failing(**row) for row in rows[:LIMIT]], more=len(rows) > LIMIT)


async def find_failing(
    connection: Connection, table: Table, wanted: RefusedFilter, context: str | None, after: str | None
) -> tuple[list[str], str | None]:
    """Return the ids of wanted rows that are refused, after one, and the last of them if there are more."""
    values = context, wanted.subject, wanted.older_than_seconds, wanted.ids, after, LIMIT + 1, wanted.before
    ids = [row["id"] for row in await connection.fetch(table.queries["find_failing"], *values)]
    return ids[:LIMIT], ids[LIMIT - 1] if len(ids) > LIMIT else None


async def drop_failing(
    connection: Connection, table: Table, ids: Sequence[str], *, actor: str, reason: str
) -> list[str]:
    """Drop rows that were found; return those that are, without any that was published meanwhile."""
    dropped = {row["id"] for row in await connection.fetch(table.queries["drop"], ids, actor, reason)}
    return [text for text in ids if text in dropped]


EFFECTS: Final = MappingProxyType({"drop": drop_failing})
"""What each verb does to refused rows."""


async def not_done(connection: Connection, table: Table, wanted: RefusedFilter, done: Collection[str]) -> list[Failure]:
    """Return the failures of the named rows to which nothing was done: they are not refused, or were dropped before."""
    errors = {text: not_failing(table.name, text) for text in wanted.ids or () if text not in done}
    if errors:
        for text, *by in await connection.fetch(table.queries["find_dropped"], list(errors)):
            errors[text] = was_dropped(table.name, text, *by)
    return [Failure(id=text, problem=error.problem) for text, error in errors.items()]


async def list_dropped(connection: Connection, table: Table, context: str | None = None) -> list[Dropped]:
    """Return what was dropped last, of one context or of all, oldest first."""
    return [Dropped(**row) for row in await connection.fetch(table.queries["list_dropped"], context, LIMIT)]


async def list_backlogs(
    connection: Connection, context: str | None = None, *, tables: Sequence[Table] = TABLES
) -> list[SourceBacklog]:
    """Return what waits to be published of each table, of one context or of all."""
    return [await _backlog(connection, table, context) for table in tables]


async def _backlog(database: Pool | Connection, table: Table, context: str | None) -> SourceBacklog:
    row = await database.fetchrow(table.queries["backlog"], context)
    assert row is not None  # noqa: S101 - aggregates without groups always have a row
    return SourceBacklog(source=table.name, **dict(row))


async def redrive(
    connection: Connection,
    wanted: PublishedFilter,
    *,
    until: datetime,
    after: datetime | None = None,
    dry_run: bool = False,
    tables: Sequence[Table] = TABLES,
) -> tuple[list[Redriven], datetime | None]:
    """Have wanted rows that were published before `until` published again, in the caller's transaction, or count them.

    Of each table some thousand are examined, those that were published first `after` a time; returns how many of each
    it was, and the time after which the next call goes on, if there are more. The first call raises `NotFound` for a
    stream that nothing is in, unless it has the name of a default one: a count of 0 would read as good news.
    """
    if after is None and wanted.stream is not None and not is_stream_name(wanted.stream):
        has = [await connection.fetchval(table.queries["has_stream"], wanted.stream) for table in tables]
        if not any(has):
            raise stream_unknown(wanted.stream)
    after = after or wanted.earliest(until)
    stretch = after, until, wanted.stream, _STEP
    ends = [await connection.fetchval(table.queries["find_stretch"], *stretch) for table in tables]
    end = min((one for one in ends if one is not None), default=until)
    found = []
    for table in tables:
        rows = await connection.fetch(table.queries["find_since"], after, end, wanted.stream, wanted.confirmed)
        keys = [row[0] for row in rows]
        count = len(keys) if dry_run else await count_changed(connection, table.queries["requeue"], keys)
        found.append(Redriven(table.name, count))
    return found, end if end < until else None
