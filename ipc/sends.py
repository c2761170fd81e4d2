"""`/v1/send`, `/v1/send/batch` and `/v1/sends/{client_message_id}`: handing messages in, and asking after them."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any, Final

import msgspec
from aiohttp import web
from multidict import istr

from chassis.routes import decode_query
from ipc.accept_table import answer
from ipc.answers import JSON, Answer, json_answer
from ipc.batch import Batch
from ipc.request import BodyReader, Request, check_media
from ipc.services import Services
from outbox.model import Caller
from postroom.errors import InvalidMessage, NotFound, PostroomError
from postroom.ids import is_client_message_id
from postroom.message import PreparedSend, prepare
from postroom.operations import WaitQuery
from postroom.sends import SETTLED, OutboxRow

LARGE_BODY_BYTES: Final = 64 * 1024  # above it a body is decoded beside the loop, which goes on answering others
_IDEMPOTENCY_KEY: Final = istr("Idempotency-Key")
_TRACEPARENT: Final = istr("traceparent")
_REPLAYED: Final = "Idempotent-Replayed: true\r\n"

_encode: Final = msgspec.json.Encoder().encode


class Sends:
    """The handlers of sends."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._accept = services.outbox.accept
        self._counters = services.counters
        self._read = BodyReader(services.limits, services.budget).read
        self._holding = services.budget.holding
        self._body_bytes = services.limits.body_bytes

    async def send(self, request: Request) -> web.StreamResponse:
        """Accept one message: 202 once its row is on disk, else what the accept table says (seed §4.5.1)."""
        began = perf_counter()
        try:
            check_media(request, JSON)
            body = await self._read(request)
            with self._holding(len(body)):  # until it is on disk
                prepared = await self._prepared(request, body)
                self._services.destinations.check(prepared.destination)
                (row,) = await self._accept((prepared,), request.caller)
            outcome = row if isinstance(row, PostroomError) else answer(row, prepared, request.caller)
            if isinstance(outcome, PostroomError):
                raise outcome
        except PostroomError as error:
            self._counters.sends[error.code] += 1
            raise
        self._counters.sends[outcome.result.status] += 1
        self._counters.accept.observe(perf_counter() - began)
        headers = _REPLAYED if outcome.replayed else ""
        if outcome.http_status == 202:  # noqa: PLR2004 - the accept table's own number
            headers += f"Location: /v1/sends/{prepared.client_message_id}\r\n"
        return Answer(outcome.http_status, _encode(outcome.result), JSON, headers)

    async def batch(self, request: Request) -> web.StreamResponse:
        """Accept a stream of messages, one JSON object a line, and answer each as soon as it is on disk."""
        self._counters.batches += 1
        return await Batch(self._services, request).run()

    async def where(self, request: Request) -> web.StreamResponse:
        """Say where a send is now; with `wait` not before it is done, dead or aborted, or the time is up."""
        seconds = decode_query(request, WaitQuery).wait
        client_message_id = request.params["client_message_id"]
        row = await self._visible(client_message_id, request.caller)
        if seconds and row.status not in SETTLED:
            row = await self._settled(request, client_message_id, seconds) or row
        return json_answer(row)

    async def _settled(self, request: Request, client_message_id: str, seconds: float) -> OutboxRow | None:
        """Wait for the row to settle, but no longer than the caller stays and the daemon runs."""
        waiting = asyncio.ensure_future(self._services.outbox.wait(client_message_id, seconds))
        ends: set[asyncio.Future[Any]] = {waiting, request.connection.until_end()}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            return await self._services.outbox.find(client_message_id)
        return waiting.result()

    async def _visible(self, client_message_id: str, caller: Caller) -> OutboxRow:
        """Find the row; another uid's does not exist for anyone but an operator."""
        known = is_client_message_id(client_message_id)
        row = await self._services.outbox.find(client_message_id) if known else None
        if row is None or not (submitted_by(row, caller) or self._services.policy.may_operate(caller)):
            raise NotFound.of(404, "send_not_found", "there is no send under this id")
        return row

    async def _prepared(self, request: Request, data: bytes) -> PreparedSend:
        headers = request.headers
        key = idempotency_key(headers.getall(_IDEMPOTENCY_KEY, ()))
        traceparent = headers.get(_TRACEPARENT)
        if len(data) <= LARGE_BODY_BYTES:
            return prepare(data, idempotency_key=key, traceparent=traceparent, max_body_bytes=self._body_bytes)
        return await asyncio.to_thread(
            prepare, data, idempotency_key=key, traceparent=traceparent, max_body_bytes=self._body_bytes
        )


def idempotency_key(values: list[str] | tuple[str, ...]) -> str | None:
    """Return the id in the header, bare or quoted as a structured field has it; two headers are a 400."""
    if not values:
        return None
    if len(values) > 1:
        detail = "the header stands more than once: a send has one id"
        raise InvalidMessage.of(400, "invalid_client_message_id", detail, field="Idempotency-Key")
    value = values[0].strip()
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return value[1:-1] if quoted else value


def submitted_by(row: OutboxRow, caller: Caller) -> bool:
    """Tell whether `caller` handed this row in: `submitted_by` is `uid:gid`."""
    return (row.submitted_by or "").partition(":")[0] == str(caller.uid)
