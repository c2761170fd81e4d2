"""Reading what was accepted: `GET /v1/history` and `GET /v1/messages/{broker_message_id}`, the authoritative reads.

`GET /v1/messages` is for people who search: the latest first, by sender, destination and time, without bodies.

An admin or an operator reads a whole mesh, in the role `look` without the bodies. A member reads what it sent, what was
sent to it, and the topics it is subscribed to.

History goes by `history_id` (docs/contract/accept.md#accept-5, and #accept-42 for a reader whose last number is lost).

`POST /v1/accepted`: which of a member's messages the broker has accepted. B0 alone: no row, no unit of the limiter.

A "no" has to stay true (docs/contract/accept.md#accept-24): before it the look-up waits for the member's batches at
work in this process, then for the transactions in Postgres that began before, from any instance. It cannot see a batch
that waits for its turn elsewhere; that ends unwritten once its instance notices that the caller has disconnected.
"""

import asyncio
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import asyncpg
import msgspec
from aiohttp import web

from broker.accept import AcceptService, answer_taken
from broker.authentication import PRINCIPAL, Member, Principal, own_mesh
from broker.database import QUERIES
from broker.operator import Handlers, missing
from broker.shares import Slices
from broker.store import find_taken
from postroom._wire import administration as api
from postroom._wire.accept import AcceptAnswer, AcceptedQuery, AcceptResponse
from postroom._wire.message import Destination, parse_destination
from postroom._wire.nouns import invalid_cursor
from postroom.chassis.postgres import Connection, uuid_of
from postroom.chassis.routes import decode_query, json_response
from postroom.delivery.message import history_message
from postroom.errors import Gone, NotFound, TryAgain

LOOK_AT: Final = 10_000  # rows of history that one page looks at, so that a page costs the same for every member
MAX_PAGE_BYTES: Final = 2 * 1024 * 1024  # of bodies and metas: what is answered with in a millisecond or two
_ROWS_AT_ONCE: Final = 16  # that Postgres makes and the broker holds: each may have a body of a megabyte
_WAIT_SECONDS: Final = 3.0  # for posts that began before; below the callers' patience
_LOOK_SECONDS: Final = 0.01  # between two looks at the transactions
_FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, eq=False)
class History(Handlers):
    """The handlers of the history routes."""

    _slices: Slices

    async def list_messages(self, request: web.Request) -> web.Response:
        """`GET /v1/history?mesh=&after=&limit=&destination=&incarnation=`."""
        query = decode_query(request, api.HistoryQuery)
        principal = request[PRINCIPAL]
        mesh = own_mesh(principal, query.mesh)
        kind, ref = _of_destination(query.destination)
        async with self.reading(request) as connection:
            ((incarnation, mesh_id, last_before),) = await connection.fetch(QUERIES["find_cursor"], mesh, query.after)
            if mesh_id is None:
                raise missing("mesh", mesh)
            if last_before is not None or query.incarnation not in (None, str(incarnation)):
                resume_after = query.after if last_before is None else last_before
                sentence = (
                    "the broker's database was restored to an earlier state, or replaced, since this cursor was "
                    f"issued: the history is the same up to history_id {resume_after}; resume there, and expect to "
                    "read messages again that were sent again"
                )
                raise Gone.of("history_restored", sentence, resume_after=resume_after, incarnation=str(incarnation))
            values = (mesh_id, query.after, LOOK_AT, query.limit, _reader(principal), kind, ref)
            patient_until = time.monotonic() + _WAIT_SECONDS
            while True:
                (horizon,) = await connection.fetch(QUERIES["history_horizon"], mesh_id)
                page = _Page(bodies=principal.reads_bodies)
                async with connection.transaction(readonly=True):
                    cursor = await connection.cursor(QUERIES["read_history"], *values, *horizon)
                    while page.size < MAX_PAGE_BYTES and (rows := await cursor.fetch(_ROWS_AT_ONCE)):
                        await self._slices.each(principal.whose, rows, page.add)
                if page.looked_to is not None or not page.more:
                    break
                if time.monotonic() > patient_until:
                    raise _posts_at_work("come before the next message")
                await asyncio.sleep(_LOOK_SECONDS)
        next_after = page.looked_to if page.more else None
        if page.messages and (len(page.messages) < page.matched or page.matched == query.limit):
            next_after = page.last
        answer = api.HistoryPage(
            messages=page.messages, next_after=next_after, incarnation=str(incarnation), deleted_to=page.deleted_to
        )
        return json_response(answer)

    async def find_messages(self, request: web.Request) -> web.Response:
        """`GET /v1/messages?mesh=&sender=&destination=&since=&until=&cursor=&limit=`."""
        query = decode_query(request, api.MessagesQuery)
        principal = request[PRINCIPAL]
        mesh = own_mesh(principal, query.mesh)
        kind, ref = _of_destination(query.destination)
        before = (query.until or _LAST, 0) if query.cursor is None else _place(query.cursor)
        async with self.reading(request) as connection:
            ((_, mesh_id, _),) = await connection.fetch(QUERIES["find_cursor"], mesh, 0)
            if mesh_id is None:
                raise missing("mesh", mesh)
            wanted = (query.limit, _reader(principal), query.sender, kind, ref)
            rows = await connection.fetch(
                QUERIES["find_latest"], mesh_id, *before, query.since or _FIRST, LOOK_AT, *wanted
            )
        found = [msgspec.convert(dict(row), api.MessageLine) for row in rows if row["history_id"] is not None]
        last: tuple[datetime, int] | None = None
        if len(found) == query.limit:
            last = found[-1].accepted_at, found[-1].history_id
        elif rows[0]["looked_at"] == LOOK_AT:
            last = rows[0]["last_at"], rows[0]["last_id"]
        next_cursor = None if last is None else f"{last[0].isoformat()}/{last[1]}"
        return json_response(api.MessageLines(messages=found, next_cursor=next_cursor))

    async def get_message(self, request: web.Request) -> web.Response:
        """`GET /v1/messages/{broker_message_id}`; 404 also for a message that the caller may not see."""
        text = request.match_info["broker_message_id"]
        principal = request[PRINCIPAL]
        missing = NotFound.of(
            "message_not_found",
            f"there is no message {text[:64]!r}, or you may not read it: look for it with `postroom trace`",
        )
        if (broker_message_id := uuid_of(text)) is None:
            raise missing
        async with self.reading(request) as connection:
            reading = (principal.mesh_id, _reader(principal))
            row = await connection.fetchrow(QUERIES["read_message"], broker_message_id, *reading)
        if row is None:
            raise missing
        return json_response(_shown(row, bodies=principal.reads_bodies))


def _of_destination(named: str | None) -> Destination | tuple[None, None]:
    """Read the destination whose messages are asked for, if they are of one; raises `InvalidMessage`."""
    return (None, None) if named is None else parse_destination(named, "destination")


def _place(cursor: str) -> tuple[datetime, int]:
    """Read the cursor of a page of the latest messages: where the page before ended."""
    try:
        moment, number = cursor.split("/")
        return datetime.fromisoformat(moment).astimezone(UTC), msgspec.convert(number, api.HistoryId, strict=False)
    except (OverflowError, ValueError):
        raise invalid_cursor() from None


class _Page:
    def __init__(self, *, bodies: bool) -> None:
        self.messages: list[Any] = []  # encoded
        self._bodies = bodies
        self.size = 0  # bytes of bodies and metas
        self.matched = 0  # rows of the history that the caller may see, of those that were looked at
        self.looked_to: int | None = None  # the last history_id that was looked at
        self.more = False  # whether the history goes on behind it
        self.deleted_to: int | None = None  # the last history_id that retention has deleted
        self.last: int | None = None  # that of the last message

    def add(self, row: asyncpg.Record) -> None:
        """Add a row of `read_history`; a page that is full leaves it to the next one."""
        self.looked_to, self.matched, self.more = row["looked_to"], row["matched"], row["more"]
        self.deleted_to = row["deleted_to"]
        if row["history_id"] is not None and self.size < MAX_PAGE_BYTES:
            self.messages.append(msgspec.Raw(msgspec.json.encode(_shown(row, bodies=self._bodies))))
            self.size += len(row["body"]) + len(row["meta"] or "")
            self.last = row["history_id"]


def _shown(row: asyncpg.Record, *, bodies: bool) -> api.HistoryMessage:
    message = history_message(row)
    return message if bodies else msgspec.structs.replace(message, body=None, body_base64=None)


def _reader(principal: Principal) -> int | None:
    """Return the member that what is read is limited to; None for callers that see everything."""
    return principal.member_id if isinstance(principal, Member) and principal.role == "member" else None


@dataclass(frozen=True, eq=False)
class LookUp(Handlers):
    """Answers for ids; one for the whole process."""

    _accepting: AcceptService

    async def accepted(self, sender: Member, asked: AcceptedQuery) -> AcceptResponse:
        """Answer for each message, in order: 200 where it was accepted, 404 where it was not, 409 for a used id.

        Raises `TryAgain` (503) where Postgres cannot say, or posts that began before do not end in time.
        """
        ids = {message.client_message_id for message in asked.messages}
        async with self._database.read(sender.whose) as connection:
            taken = await find_taken(connection, sender.mesh_id, ids)
        if len(taken) < len(ids):
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await self._accepting.until_ended(sender)
                    async with self._database.read(sender.whose) as connection:
                        await _until_written(connection)
                        taken = await find_taken(connection, sender.mesh_id, ids)
            except TimeoutError:
                raise _posts_at_work("have these ids") from None
        answers = []
        for each in asked.messages:
            name = each.client_message_id
            if (row := taken.get(name)) is not None:
                answers.append(answer_taken(sender, name, bytes.fromhex(each.request_fingerprint), row))
                continue
            problem = NotFound.of(
                "not_accepted", f"no message was accepted under the id {name}: it can be sent again"
            ).problem
            answers.append(AcceptAnswer(status=problem.status, client_message_id=name, problem=problem))
        return AcceptResponse(answers=answers)


async def _until_written(connection: Connection) -> None:
    """Wait until the transactions that write dedupe rows now have ended; a standby cannot know them."""
    if await connection.fetchval(QUERIES["is_read_only"]):
        sentence = "Postgres is read-only at present, and may lack accepted messages: ask again"
        raise TryAgain.of("database_unavailable", sentence, retryable=True, retry_after=1.0)
    under_way = await connection.fetchval(QUERIES["accepts_under_way"], None)
    while under_way:
        await asyncio.sleep(_LOOK_SECONDS)
        under_way = await connection.fetchval(QUERIES["accepts_under_way"], under_way)


def _posts_at_work(danger: str) -> TryAgain:
    sentence = f"earlier posts are still running, and may {danger}: ask again"
    return TryAgain.of("posts_at_work", sentence, retryable=True, retry_after=1.0)
