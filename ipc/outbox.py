"""`/v1/outbox…`: how an operator sees the rows and repairs them (docs/contract/send.md#send-14)."""

from typing import Final, TypeVar

import msgspec
from aiohttp import web

from ipc.answers import JSON, json_answer
from ipc.request import BodyReader, Request, check_media, decode_body
from ipc.services import Services
from outbox import RowFilter
from postroom._wire.ids import now_ms
from postroom._wire.message import PreparedSend, SendRequest, check_client_message_id, prepare
from postroom._wire.operations import (
    MAX_PAGE,
    VERBS,
    AbortRequest,
    BulkRequest,
    ListQuery,
    PruneRequest,
    PruneResult,
    RequeueRequest,
    ResendRequest,
    ResendResult,
    Verb,
)
from postroom.chassis.routes import NDJSON, Handler, decode_query
from postroom.errors import InvalidMessage

T = TypeVar("T", bound=msgspec.Struct)

_encode_lines: Final = msgspec.json.Encoder().encode_lines


class OutboxDesk:
    """The handlers of the outbox; the route table lets only operators in."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._outbox = services.outbox
        self._reader = BodyReader(services.limits, services.budget)

    async def list(self, request: Request) -> web.StreamResponse:
        """List rows, oldest first and page by page, never a payload."""
        query = decode_query(request, ListQuery)
        return json_answer(await self._outbox.list_rows(_filter(query), query.cursor, query.limit))

    async def export(self, request: Request) -> web.StreamResponse:
        """Stream every row that the query means, a JSON object a line, never a payload."""
        query = decode_query(request, ListQuery)
        response = web.StreamResponse(headers={"Content-Type": NDJSON})
        page = await self._outbox.list_rows(_filter(query), query.cursor, MAX_PAGE)
        await response.prepare(request)
        await response.write(_encode_lines(page.rows))
        while page.next_cursor is not None:
            page = await self._outbox.list_rows(_filter(query), page.next_cursor, MAX_PAGE)
            await response.write(_encode_lines(page.rows))
        await response.write_eof()
        return response

    async def inspect(self, request: Request) -> web.StreamResponse:
        """Show one row, the chain of requeues it belongs to, and what operators did to it."""
        return json_answer(await self._outbox.inspect(_id(request)))

    def one(self, verb: Verb) -> Handler:
        """Make the handler of `verb` on one row; it answers the row, of a requeue the successor."""

        async def handle(request: Request) -> web.StreamResponse:
            asked = await self._body(request, VERBS[verb].body)
            new_id = patch = None
            if isinstance(asked, RequeueRequest):
                new_id = asked.new_client_message_id
                patch = None if asked.message is None else self._patch(asked.message, new_id)
            row = await self._outbox.act(
                verb,
                _id(request),
                caller=request.caller,
                reason=asked.reason,
                force=isinstance(asked, AbortRequest) and asked.force,
                new_client_message_id=new_id,
                patch=patch,
            )
            return json_answer(row)

        return handle

    async def prune(self, request: Request) -> web.StreamResponse:
        """Empty the payloads of old done and aborted rows; the rows stay."""
        asked = await self._body(request, PruneRequest)
        before = now_ms() - int(asked.older_than_seconds * 1000)
        pruned = await self._outbox.prune(before, caller=request.caller, reason=asked.reason)
        return json_answer(PruneResult(pruned=pruned))

    async def resend(self, request: Request) -> web.StreamResponse:
        """Send the done rows that the broker's database lost again, under their own ids, or count them."""
        asked = await self._body(request, ResendRequest)
        if asked.dry_run:
            missing = await self._outbox.missing()
            kept = missing.rows - missing.without_payload
            return json_answer(ResendResult(dry_run=True, resent=kept, without_payload=missing.without_payload))
        sent = await self._outbox.resend_missing(caller=request.caller, reason=asked.reason)
        return json_answer(
            ResendResult(
                dry_run=False,
                resent=len(sent.row_ids),
                without_payload=len(sent.without_payload),
                without_payload_ids=sent.without_payload,
                more=sent.after is not None,
            )
        )

    def bulk(self, verb: Verb) -> Handler:
        """Make the handler of `verb` on every row that a filter means, or a dry run of it."""

        async def handle(request: Request) -> web.StreamResponse:
            asked = await self._body(request, BulkRequest)
            if asked.force and not VERBS[verb].retires:
                retiring = " and ".join(sorted(name for name, each in VERBS.items() if each.retires))
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

    async def _body(self, request: Request, kind: type[T]) -> T:
        check_media(request, JSON)
        return decode_body(await self._reader.read(request), kind)

    def _patch(self, message: SendRequest, new_client_message_id: str | None) -> PreparedSend:
        if message.client_message_id is not None:
            detail = (
                "the message replaces that of the row and must not have an id of its own: use new_client_message_id"
            )
            raise InvalidMessage.of("invalid_field", detail, field="message.client_message_id")
        patch = prepare(message, idempotency_key=new_client_message_id, max_body_bytes=self._services.limits.body_bytes)
        self._services.destinations.check(patch.destination)
        return patch


def _id(request: Request) -> str:
    return check_client_message_id(request.params["id"], "id")


def _filter(query: ListQuery) -> RowFilter:
    return RowFilter(
        status=query.status,
        destination=query.destination,
        code=query.code,
        older_than_seconds=query.older_than_seconds,
        held=query.held,
    )
