"""`/v1/outbox…`: operators see and repair rows (docs/contract/send.md#send-14).

And `/v1/trace/{id}`: the story of a message from its rows (docs/contract/operate.md#operate-51).
"""

import socket
from datetime import UTC, datetime
from typing import Final

import msgspec
from aiohttp import hdrs, web

from ipc.connection import BodyReader, Request, json_answer, stream_answer
from ipc.services import Services
from outbox import RowFilter
from postroom._wire import operations
from postroom._wire.ids import now_ms
from postroom._wire.message import PreparedSend, SendRequest, check_client_message_id, check_destination, prepare
from postroom._wire.moment import from_milliseconds
from postroom._wire.nouns import LogPage, LogQuery
from postroom._wire.sends import MAX_PAGE, OutboxRow, RelayStatus
from postroom._wire.trace import StoryDraft, TraceQuery, Wait, compose, help_for, steps_of
from postroom._wire.transport import NDJSON, SQLITE
from postroom._wire.words import when
from postroom.chassis.routes import Handler, decode_query
from postroom.errors import InvalidMessage, NotFound

_encode_lines: Final = msgspec.json.Encoder().encode_lines


class OutboxRoutes:
    """The handlers of the outbox; the route table lets only operators in."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._outbox = services.outbox
        self._reader = BodyReader(services.limits, services.budget)

    async def list(self, request: Request) -> web.StreamResponse:
        """List rows, oldest first and page by page, never a payload."""
        query = decode_query(request, operations.ListQuery)
        return json_answer(await self._outbox.list_rows(_filter(query), query.cursor, query.limit))

    async def export(self, request: Request) -> web.StreamResponse:
        """Stream every row that matches the query, a JSON object a line, never a payload."""
        query = decode_query(request, operations.ExportQuery)
        response = stream_answer(NDJSON)
        page = await self._outbox.list_rows(_filter(query), None, MAX_PAGE)
        await response.prepare(request)
        if request.method == hdrs.METH_HEAD:
            return response
        await response.write(_encode_lines(page.rows))
        while page.next_cursor is not None:
            page = await self._outbox.list_rows(_filter(query), page.next_cursor, MAX_PAGE)
            await response.write(_encode_lines(page.rows))
        await response.write_eof()
        return response

    async def inspect(self, request: Request) -> web.StreamResponse:
        """Show one row, its chain of requeues, and what operators did to it."""
        return json_answer(await self._outbox.inspect(_id(request)))

    async def log(self, request: Request) -> web.StreamResponse:
        """List what operators did to rows and to the relay, the latest first and page by page."""
        query = decode_query(request, LogQuery)
        if query.mesh not in (None, self._services.mesh):
            return json_answer(LogPage(lines=[]))
        return json_answer(await self._outbox.operations(query))

    def one(self, verb: operations.Verb) -> Handler:
        """Make the handler of `verb` on one row; it answers the row, or the successor of a requeue."""

        async def handle(request: Request) -> web.StreamResponse:
            asked = await self._reader.decode(request, operations.VERBS[verb].body)
            new_id = patch = None
            if isinstance(asked, operations.RequeueRequest):
                new_id = asked.new_client_message_id
                patch = None if asked.message is None else self._patch(asked.message)
            row = await self._outbox.act(
                verb,
                _id(request),
                caller=request.caller,
                reason=asked.reason,
                force=isinstance(asked, operations.AbortRequest) and asked.force,
                new_client_message_id=new_id,
                patch=patch,
            )
            return json_answer(row)

        return handle

    async def trace(self, request: Request) -> web.StreamResponse:
        """Show what became of a row, its predecessors and successors, and whether the inbox has the message."""
        wanted, name = decode_query(request, TraceQuery), _id(request)
        missing: NotFound | None = None
        place = f"postroomd on {socket.gethostname()}"
        draft = StoryDraft(place)
        try:
            chain = await self._outbox.inspect(name)
        except NotFound as error:
            missing = error
        else:
            draft.steps = steps_of(chain.chain, chain.log, chain.failed_posts, place)
            relay = self._services.relay.status()
            found = [wait_of(row, relay, self._services.mesh) for row in chain.chain]
            draft.waits = {wait.step: wait for wait in found if wait is not None}
        try:
            inbox = self._services.inbox.opened()
        except NotFound:  # this daemon has none
            inbox = None
        if inbox is not None and wanted.sender is not None:
            filed = await inbox.received(self._services.mesh, wanted.sender, name)
            if filed is not None:
                id_, at = filed.broker_message_id, from_milliseconds(filed.received_at)
                ids = {"position": str(filed.position)}
                draft.add("filed", f"{place} {id_}", "received", f"message:{id_}", thing=id_, at=at, ids=ids)
        if missing is not None and not draft.steps:
            raise missing
        return json_answer(compose(draft.steps, draft.waits))

    async def prune(self, request: Request) -> web.StreamResponse:
        """Delete the payloads of old done and aborted rows; the rows stay."""
        asked = await self._reader.decode(request, operations.PruneRequest)
        age = asked.older_than_seconds
        before = None if age is None else now_ms() - int(age * 1000)
        pruned, after = await self._outbox.prune(before, after=asked.cursor, caller=request.caller, reason=asked.reason)
        return json_answer(operations.PruneResult(pruned=pruned, next_cursor=after))

    async def resend(self, request: Request) -> web.StreamResponse:
        """Send the done rows that the broker's database lost again, under their own ids, or count them."""
        asked = await self._reader.decode(request, operations.ResendRequest)
        if asked.dry_run:
            missing = await self._outbox.missing()
            kept = missing.rows - missing.without_payload
            return json_answer(
                operations.ResendResult(dry_run=True, resent=kept, without_payload=missing.without_payload)
            )
        sent = await self._outbox.resend_missing(caller=request.caller, reason=asked.reason)
        return json_answer(
            operations.ResendResult(
                dry_run=False,
                resent=len(sent.row_ids),
                without_payload=len(sent.without_payload),
                without_payload_ids=sent.without_payload,
                more=sent.after is not None,
            )
        )

    async def backup(self, request: Request) -> web.StreamResponse:
        """Stream a copy of the whole outbox, payloads too: an SQLite file."""
        asked = await self._reader.decode(request, operations.BackupRequest)
        async with self._outbox.backup(caller=request.caller, reason=asked.reason) as copy:
            response = stream_answer(SQLITE, **{"Content-Length": str(copy.size)})
            await response.prepare(request)
            piece = await copy.piece(0)
            offset = len(piece)
            while following := await copy.piece(offset):
                await response.write(piece)
                piece, offset = following, offset + len(following)
        await response.write(piece)  # the last one, once the next backup may be requested
        await response.write_eof()
        return response

    def bulk(self, verb: operations.Verb) -> Handler:
        """Make the handler of `verb` on every row that matches a filter, or a dry run of it."""

        async def handle(request: Request) -> web.StreamResponse:
            asked = await self._reader.decode(request, operations.BulkRequest)
            check_destination(asked.filter.destination)
            if asked.force and not operations.VERBS[verb].retires:
                retiring = " and ".join(sorted(name for name, each in operations.VERBS.items() if each.retires))
                detail = f"force is only for verbs that retire rows, {retiring}: omit it"
                raise InvalidMessage.of("invalid_field", detail, field="force")
            result = await self._outbox.bulk(
                verb,
                asked.filter,
                caller=request.caller,
                reason=asked.reason,
                force=asked.force,
                dry_run=asked.dry_run,
                cursor=asked.cursor,
            )
            return json_answer(result)

        return handle

    def _patch(self, message: SendRequest) -> PreparedSend:
        if message.client_message_id is not None:
            detail = (
                "the message replaces that of the row and must not have an id of its own: use new_client_message_id"
            )
            raise InvalidMessage.of("invalid_field", detail, field="message.client_message_id")
        patch = prepare(message, max_body_bytes=self._services.limits.body_bytes)
        self._services.destinations.check(patch.destination)
        return patch


def _id(request: Request) -> str:
    return check_client_message_id(request.params["id"], "id")


def _filter(query: operations.ListQuery | operations.ExportQuery) -> RowFilter:
    check_destination(query.destination)
    return msgspec.convert(query, RowFilter, from_attributes=True)


def wait_of(row: OutboxRow, relay: RelayStatus, mesh: str) -> Wait | None:
    """Return why a row is not accepted yet, and what would help; None where it no longer waits."""
    why, help_ = "", None
    match row.status:
        case "done" | "aborted":
            return None
        case "inflight":
            why = "it is being posted to the broker"
        case "dead":
            why, help_ = f"it will not be posted again: {row.last_error}", help_for(row, mesh)
        case _ if row.held:
            why, help_ = "an operator holds it back", f"postroom outbox release {row.id} --reason 'it may go'"
        case _ if relay.state == "paused":
            why, help_ = "an operator has paused the relay", "postroom relay resume --reason 'it was paused'"
        case _ if row.destination in relay.paused_destinations:
            why = f"an operator has paused the relay to {row.destination}"
            help_ = f"postroom relay resume {row.destination} --reason 'it was paused'"
        case _ if row.not_before is not None and row.not_before > datetime.now(UTC):
            why = f"its sender wants it posted at {when(row.not_before)}"
        case _ if relay.state == "waiting":
            why, help_ = f"the relay waits: {relay.reason}", "postroom doctor"
        case _ if row.next_attempt_at > datetime.now(UTC):
            why = f"it is posted again at {row.next_attempt_at:%H:%M:%SZ}: {row.last_error}"
            limited = (row.last_error or "").startswith("rate_limited")  # another try now is refused too
            help_ = None if limited else f"postroom outbox flush {row.id} --reason 'it can go now'"
        case _:
            why = "it is due, and the relay posts it next"
    return Wait(step=f"row:{row.id}", why=why, help=help_)
