"""`/v1/send`, `/v1/send/batch`, `/v1/cloudevents` and `/v1/sends…`: handing in, and asking after it."""

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Final

import msgspec
from aiohttp import web
from multidict import istr

from ipc.batch import Batch
from ipc.http import JSON, Answer, BodyReader, PlainSend, Request, check_media, decode_body, json_answer
from ipc.services import Services
from ipc.shares import TURN
from outbox import Caller
from postroom._wire.accept_table import answer
from postroom._wire.cloudevents import CloudEventQuery, read_event
from postroom._wire.ids import is_client_message_id
from postroom._wire.message import SendRequest, decode_request, prepare
from postroom._wire.operations import SendsQuery, WaitQuery
from postroom._wire.sends import SETTLED, OutboxRow, SendList
from postroom.chassis.routes import decode_query
from postroom.errors import InvalidMessage, NotFound, PostroomError

_SMALL_BODY_BYTES: Final = 2048  # what counts as no more than any request does
_IDEMPOTENCY_KEY: Final = istr("Idempotency-Key")
_TRACEPARENT: Final = istr("traceparent")
_REPLAYED: Final = "Idempotent-Replayed: true\r\n"

_encode: Final = msgspec.json.Encoder().encode


class Sends:
    """The handlers of sends."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._outbox = services.outbox
        self._destinations = services.destinations
        self._counters = services.counters
        self._read = BodyReader(services.limits, services.budget).read
        self._budget = services.budget
        self._waits = services.waits
        self._body_bytes = services.limits.body_bytes

    async def send(self, request: Request | PlainSend) -> Answer:
        """Accept one message."""
        return await self._accept(request, JSON, decode_request)

    async def cloudevent(self, request: Request) -> Answer:
        """Accept one CloudEvent, in either mode, as a message (docs/contract/send.md#send-107)."""

        def decode(body: bytes) -> SendRequest:
            return read_event(request.headers, body).message(decode_query(request, CloudEventQuery).to)

        return await self._accept(request, None, decode)

    async def _accept(
        self, request: Request | PlainSend, media: str | None, decode: Callable[[bytes], SendRequest]
    ) -> Answer:
        """Accept one message: 202 once its row is on disk, else by the accept table (docs/contract/send.md#send-37)."""
        began = perf_counter()
        caller = request.caller
        try:
            check_media(request, media)
            body = await self._read(request)
            self._budget.take(len(body), caller.uid)  # until it is on disk
            try:
                headers = request.headers
                key = idempotency_key(headers.getall(_IDEMPOTENCY_KEY, ()))
                traceparent = headers.get(_TRACEPARENT)
                if len(body) > _SMALL_BODY_BYTES:
                    await request.take_turn(len(body))
                decoded = decode(body)
                if len(body) > TURN:
                    await request.take_turn(len(body))
                prepared = prepare(
                    decoded, idempotency_key=key, traceparent=traceparent, max_body_bytes=self._body_bytes
                )
                (row,) = await self._destinations.accept(self._outbox, (prepared,), caller)
            finally:
                self._budget.give_back(len(body), caller.uid)
            outcome = row if isinstance(row, PostroomError) else answer(row, prepared, caller.uid)
            if isinstance(outcome, PostroomError):
                raise outcome
        except PostroomError as error:
            self._counters.sends[error.code] += 1
            raise
        self._counters.sends[outcome.result.status] += 1
        self._counters.accept.observe(perf_counter() - began)
        lines = _REPLAYED if outcome.replayed else ""
        if outcome.http_status == 202:  # noqa: PLR2004 - the accept table's own number
            lines += f"Location: /v1/sends/{prepared.client_message_id}\r\n"
        return Answer(outcome.http_status, _encode(outcome.result), JSON, lines)

    async def batch(self, request: Request) -> web.StreamResponse:
        """Accept a stream of messages, one JSON object a line, and answer each as soon as it is on disk."""
        self._counters.batches += 1
        return await Batch(self._services, request).run()

    async def where(self, request: Request) -> web.StreamResponse:
        """Say where a send is now; with `wait` not before it is done, dead or aborted, or the time is up."""
        seconds = decode_query(request, WaitQuery).wait
        client_message_id = request.params["client_message_id"]
        rows = await self._settled(request, [client_message_id], seconds)
        if not rows:
            raise NotFound.of("send_not_found", "there is no send under this id: `postroom outbox list` shows them")
        return json_answer(rows[0])

    async def where_all(self, request: Request) -> web.StreamResponse:
        """Say where many sends are now; with `wait` not before each is done, dead or aborted, or the time is up."""
        check_media(request, JSON)
        asked = decode_body(await self._read(request), SendsQuery)
        ids = asked.client_message_ids
        rows = {row.client_message_id: row for row in await self._settled(request, ids, asked.wait)}
        found = [rows[each] for each in dict.fromkeys(ids) if each in rows]
        return json_answer(SendList(rows=found, missing=[each for each in dict.fromkeys(ids) if each not in rows]))

    async def _settled(self, request: Request, ids: Sequence[str], seconds: float) -> list[OutboxRow]:
        """Return the rows of these sends that the caller may see, once they are settled.

        Waits `seconds` at most, and no longer than the caller stays and the daemon runs.
        """
        if seconds:
            self._waits.ask(1, request.caller.uid)
        rows = await self._visible(ids, request.caller)
        unsettled = [row.id for row in rows if row.status not in SETTLED]
        if not seconds or not unsettled:
            return rows
        with self._waits.holding(1, request.caller.uid):
            request.only_waits()
            waiting = asyncio.ensure_future(self._outbox.wait_all(unsettled, seconds))
            ends: set[asyncio.Future[Any]] = {waiting, request.connection.until_end()}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
            else:
                waiting.cancel()
        return await self._visible(ids, request.caller)

    async def _visible(self, ids: Sequence[str], caller: Caller) -> list[OutboxRow]:
        """Find the rows; another uid's does not exist for anyone but an operator."""
        known = [each for each in ids if is_client_message_id(each)]
        may_operate = self._services.policy.may_operate(caller)
        rows = await self._outbox.find_all(known) if known else []
        return [row for row in rows if may_operate or submitted_by(row, caller)]


def idempotency_key(values: list[str] | tuple[str, ...]) -> str | None:
    """Return the id in the header, bare or quoted as a structured field has it; two headers are a 400."""
    if not values:
        return None
    if len(values) > 1:
        detail = "the header is given more than once: give it once, since a send has one id"
        raise InvalidMessage.of("invalid_client_message_id", detail, field="Idempotency-Key")
    value = values[0].strip()
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return value[1:-1] if quoted else value


def submitted_by(row: OutboxRow, caller: Caller) -> bool:
    """Tell whether `caller` handed this row in: `submitted_by` is `uid:gid`."""
    return (row.submitted_by or "").partition(":")[0] == str(caller.uid)
