"""`/v1/send`, `/v1/send/batch`, `/v1/cloudevents` and `/v1/sends…`: sending, and asking for the state of a send.

One message, or a stream of them (`Batch`); both are answered from the accept table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError
from multidict import MultiMapping, istr

from ipc.connection import (
    Answer,
    BodyReader,
    PlainSend,
    Request,
    check_media,
    decode_body,
    json_answer,
    start_body,
    stream_answer,
)
from ipc.services import Services
from ipc.shares import NO_UID, TURN, Budget, Turns
from outbox import AcceptedRow, Caller, stopped
from postroom._wire.accept_table import Answered, answer
from postroom._wire.cloudevents import CloudEventQuery, read_event
from postroom._wire.message import PreparedSend, SendRequest, decode_request, prepare
from postroom._wire.names import MESSAGE_ID
from postroom._wire.operations import SendsQuery, WaitQuery
from postroom._wire.sends import SETTLED, BatchResult, OutboxRow, SendList
from postroom._wire.transport import JSON, NDJSON
from postroom.chassis.routes import decode_query
from postroom.errors import InvalidMessage, NotFound, PostroomError

_SMALL_BODY_BYTES: Final = 2048  # of a body that counts no more than any request
_IDEMPOTENCY_KEY: Final = istr("Idempotency-Key")
_TRACEPARENT: Final = istr("traceparent")
_REPLAYED: Final = "Idempotent-Replayed: true\r\n"
CHUNK_LINES: Final = 1000
_CUT: Final = 8  # bytes of work that cutting off a line counts as
_LINE: Final = 256  # bytes that a line counts as besides its own
_ANSWER: Final = 128  # bytes of work that an answer counts as
_WAITING_CHUNKS: Final = 1

_encode: Final = msgspec.json.Encoder().encode
_encode_lines: Final = msgspec.json.Encoder().encode_lines


class SendRoutes:
    """The handlers of sends."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._outbox = services.outbox
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
                traceparent = traceparent_of(headers)
                if len(body) > _SMALL_BODY_BYTES:
                    await request.take_turn(len(body))
                decoded = decode(body)
                if len(body) > TURN:
                    await request.take_turn(len(body))
                prepared = prepare(
                    decoded, idempotency_key=key, traceparent=traceparent, max_body_bytes=self._body_bytes
                )
                (row,) = await self._services.accept((prepared,), caller)
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
        """Answer the state of a send; with `wait` once it is done, dead or aborted, or the time is up."""
        seconds = decode_query(request, WaitQuery).wait
        rows = await self._settled(request, [request.params["client_message_id"]], seconds)
        if not rows:
            raise NotFound.of("send_not_found", "there is no send under this id: `postroom outbox list` shows them")
        return json_answer(rows[0])

    async def where_all(self, request: Request) -> web.StreamResponse:
        """Answer the states of many sends; with `wait` once each is done, dead or aborted, or the time is up."""
        check_media(request, JSON)
        asked = decode_body(await self._read(request), SendsQuery)
        ids = asked.client_message_ids
        rows = {row.client_message_id: row for row in await self._settled(request, ids, asked.wait)}
        found = [rows[each] for each in dict.fromkeys(ids) if each in rows]
        return json_answer(SendList(rows=found, missing=[each for each in dict.fromkeys(ids) if each not in rows]))

    async def _settled(self, request: Request, ids: Sequence[str], seconds: float) -> list[OutboxRow]:
        """Return the rows of these sends that the caller may see, once they are settled.

        Waits `seconds` at most, and not after the caller disconnects or the daemon stops.
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
        """Find the rows; for a caller that is not an operator, rows of other uids do not exist."""
        known = [each for each in ids if MESSAGE_ID.allows(each)]
        may_operate = self._services.policy.may_operate(caller)
        rows = await self._outbox.find_all(known) if known else []
        return [row for row in rows if may_operate or submitted_by(row, caller)]


def idempotency_key(values: list[str] | tuple[str, ...]) -> str | None:
    """Return the id in the header, bare or quoted as a structured field; two headers are a 400."""
    if not values:
        return None
    if len(values) > 1:
        detail = "the header is given more than once: give it once, since a send has one id"
        raise InvalidMessage.of("invalid_client_message_id", detail, field="Idempotency-Key")
    value = values[0].strip()
    quoted = len(value) > 1 and value[0] == value[-1] == '"'
    return value[1:-1] if quoted else value


def traceparent_of(headers: MultiMapping[str]) -> str | None:
    """Return the `traceparent` in the headers; None where there is none, or two, of which none counts (W3C)."""
    given = headers.getall(_TRACEPARENT, ())
    return given[0] if len(given) == 1 else None


def submitted_by(row: OutboxRow, caller: Caller) -> bool:
    """Return whether `caller` sent this row: `submitted_by` is `uid:gid`."""
    return (row.submitted_by or "").partition(":")[0] == str(caller.uid)


class Chunk(NamedTuple):
    """Lines that share a transaction: each prepared, or refused already.

    `first` is the number of the first; `size` is what they take of the budget, in bytes. `outcomes` is done once they
    are on disk; they are written even if the caller has disconnected.
    """

    first: int
    size: int
    lines: Sequence[PreparedSend | PostroomError]
    outcomes: asyncio.Task[list[AcceptedRow | PostroomError]]


class Batch:
    """One request to the batch route: NDJSON in and out at once, each message answered as soon as it is on disk.

    Lines that have arrived, up to 1000, share one transaction; while it commits the next lines are read and checked. A
    bad line fails alone. A caller that does not read its answers is not read from either: at most three chunks are
    accepted and not answered. A line counts towards `limits.buffered_bytes` from its first byte until its commit.
    """

    def __init__(self, services: Services, request: Request) -> None:
        self._services = services
        self._request = request
        self._limits = services.limits
        self._turns = request.connection.turns
        self._uid = request.caller.uid
        self._counted = services.counters.sends

    async def run(self) -> web.StreamResponse:
        """Stream answers until the request ends; raises `InvalidMessage` before the first byte of an answer."""
        check_media(self._request, NDJSON)
        if _IDEMPOTENCY_KEY in self._request.headers:  # if it were ignored, a retry would send all of it again
            detail = "a batch has an id per line: give each its `client_message_id`, and omit the header"
            raise InvalidMessage.of("invalid_client_message_id", detail, field="Idempotency-Key")
        start_body(self._request, self._services.budget, 1)
        response = stream_answer(NDJSON)
        await response.prepare(self._request)
        self._request.connection.between_lines = True
        self._request.connection.until_end().add_done_callback(self._take_no_more)
        try:
            await self._stream(response)
        except (PostroomError, RequestPayloadError) as error:
            raise ConnectionResetError("the stream ended too early") from error  # an answer cannot begin a second time
        finally:
            self._request.connection.until_end().remove_done_callback(self._take_no_more)
            self._request.connection.between_lines = False
        return response

    def _take_no_more(self, _: asyncio.Future[None]) -> None:
        """Answer what was read, and break off: the server stops, and the next line may not come soon."""
        self._request.content.set_exception(stopped())

    async def _stream(self, response: web.StreamResponse) -> None:
        with closing(Splitter(self._limits.request_bytes, self._services.budget, self._uid)) as splitter:
            chunks: asyncio.Queue[Chunk | None] = asyncio.Queue(_WAITING_CHUNKS)
            reader = asyncio.create_task(self._read_chunks(chunks, splitter), name="batch-reader")
            try:
                while (chunk := await chunks.get()) is not None:
                    outcomes = await chunk.outcomes
                    splitter.release(chunk.size)
                    start = 0
                    while start < len(outcomes):
                        end = min(start + self._turns.size // _ANSWER, len(outcomes))
                        await self._request.take_turn((end - start) * _ANSWER)
                        numbers = range(chunk.first + start, chunk.first + end)
                        results = map(self._result, numbers, chunk.lines[start:end], outcomes[start:end])
                        await response.write(_encode_lines(list(results)))
                        start = end
                await reader
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        await response.write_eof()

    async def _read_chunks(self, chunks: asyncio.Queue[Chunk | None], splitter: Splitter) -> None:
        """Put what arrives into `chunks`, and None at its end, but not after a cancellation."""
        connection = self._request.connection
        first = 1
        try:
            async for lines in arrived_lines(self._request, splitter, self._turns):
                if lines:
                    self._request.check_again()
                    connection.between_lines = True  # from here on a delay is not the caller's
                    prepared, size = await self._prepared(lines)
                    outcomes = asyncio.create_task(self._accept(prepared), name="accept-chunk")
                    await chunks.put(Chunk(first, size, prepared, outcomes))
                    first += len(lines)
                if connection.between_lines:
                    connection.begin()
                connection.between_lines = not splitter.unfinished
        except Exception:
            await chunks.put(None)
            raise
        await chunks.put(None)

    async def _prepared(self, lines: Sequence[bytes | PostroomError]) -> tuple[list[PreparedSend | PostroomError], int]:
        """Check the lines in turns with other callers; returns also how many bytes they have."""
        prepared: list[PreparedSend | PostroomError] = []
        traceparent, most = traceparent_of(self._request.headers), self._limits.body_bytes
        size = work = 0
        for line in lines:
            length = len(line) if isinstance(line, bytes) else 0
            size += length
            work += _LINE + length
            if work > self._turns.size // 2:
                await self._request.take_turn(work)
                work = 0
            if isinstance(line, PostroomError):
                prepared.append(line)
                continue
            try:
                prepared.append(prepare(line, traceparent=traceparent, max_body_bytes=most))
            except PostroomError as error:
                prepared.append(error)
        return prepared, size

    async def _accept(self, lines: Sequence[PreparedSend | PostroomError]) -> list[AcceptedRow | PostroomError]:
        """Write the good lines of a chunk together; returns the outcome of every line."""
        sends = [line for line in lines if not isinstance(line, PostroomError)]
        try:
            rows = await self._services.accept(sends, self._request.caller)
        except PostroomError as error:  # an error of the whole chunk is the outcome of each line
            rows = [error] * len(sends)
        if len(rows) == len(lines):
            return rows
        following = iter(rows)
        return [line if isinstance(line, PostroomError) else next(following) for line in lines]

    def _result(self, number: int, line: PreparedSend | PostroomError, row: AcceptedRow | PostroomError) -> BatchResult:
        outcome: Answered | PostroomError
        if isinstance(line, PostroomError):
            outcome = line
        else:
            outcome = row if isinstance(row, PostroomError) else answer(row, line, self._uid)
        if isinstance(outcome, Answered):
            self._counted[outcome.result.status] += 1
            return BatchResult(line=number, result=outcome.result)
        self._counted[outcome.code] += 1
        return BatchResult(line=number, problem=outcome.problem)


async def arrived_lines(
    request: Request, splitter: Splitter, turns: Turns
) -> AsyncIterator[list[bytes | PostroomError]]:
    """Yield the complete lines that have arrived, at most `CHUNK_LINES` at a time, without their line ends.

    Data that completes no line yields an empty list. The last line needs no line end.
    """
    while data := await request.content.readany():
        lines: list[bytes | PostroomError] = []
        start = 0
        while start < len(data):
            end = start + turns.size // 2
            whole = splitter.feed(data[start:end])
            lines += whole
            await request.take_turn((end - start) // 4 + _CUT * len(whole))
            start = end
            while len(lines) >= CHUNK_LINES:
                yield lines[:CHUNK_LINES]
                del lines[:CHUNK_LINES]
        yield lines
    if last := splitter.rest():
        yield last


class Splitter:
    """Cuts a stream of bytes into lines; what it holds or has yielded counts in `budget`, for `uid`, until released.

    It holds at most one unfinished line of `limit` bytes. A line that is longer (413), or for which the budget has no
    room (429), becomes its refusal, counts for nothing, and its bytes are dropped as they come.
    """

    def __init__(self, limit: int, budget: Budget, uid: int = NO_UID) -> None:
        self._limit = limit
        self._budget = budget
        self._uid = uid
        self._held = 0
        self._partial = bytearray()
        self._refusal: PostroomError | None = None

    @property
    def unfinished(self) -> bool:
        """Whether a line has begun whose end has not arrived."""
        return bool(self._partial) or self._refusal is not None

    def feed(self, data: bytes) -> list[bytes | PostroomError]:
        """Return the lines that `data` completes."""
        *ends, tail = data.split(b"\n")
        if not ends:
            self._extend(tail)
            return []
        lines = [self._finish(ends[0]), *self._whole(ends[1:])]
        self._extend(tail)
        return lines

    def rest(self) -> list[bytes | PostroomError]:
        """Return the last line where it had no line end."""
        return [self._finish(b"")] if self.unfinished else []

    def release(self, count: int) -> None:
        """Give back the room of lines that have `count` bytes together."""
        self._held -= count
        self._budget.give_back(count, self._uid)

    def close(self) -> None:
        """Drop the unfinished line, and give all room back that has not been released."""
        self._partial.clear()
        self.release(self._held)

    def _whole(self, lines: list[bytes]) -> Sequence[bytes | PostroomError]:
        """Take lines that arrived in one piece, all at once where there is room, since most lines do."""
        try:
            self._take(sum(map(len, lines)))
        except PostroomError:
            return [self._finish(line) for line in lines]
        return lines

    def _finish(self, piece: bytes) -> bytes | PostroomError:
        self._extend(piece)
        line = self._refusal or bytes(self._partial)
        self._partial.clear()
        self._refusal = None
        return line

    def _extend(self, piece: bytes) -> None:
        if self._refusal is not None:
            return
        try:
            self._take(len(piece))
        except PostroomError as refusal:
            self._refusal = refusal
            self.release(len(self._partial))
            self._partial.clear()
        else:
            self._partial += piece

    def _take(self, count: int) -> None:
        if len(self._partial) + count > self._limit:
            detail = f"the line has more than {self._limit} bytes: send less, or raise limits.request_bytes"
            raise InvalidMessage.of("request_too_large", detail)
        self._budget.take(count, self._uid)
        self._held += count
