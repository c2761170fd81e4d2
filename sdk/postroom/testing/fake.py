"""`FakeClient` and `FakeAsyncClient`: the real clients, over a daemon in memory.

Everything above the socket is real: the clients, their checks, their errors, `send_many`. The daemon behind them checks
a message by the same functions as the real one, and answers from the same accept table; its outbox is a dictionary,
which ends with it. Nothing is relayed: a send stays `pending` until a test settles it, or a call such as `wait` waits
for it after its `not_before`; then it is `done`.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from copy import copy
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any, Final, Literal
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import UUID, uuid4

import msgspec

from postroom._wire.accept_table import AcceptedRow, answer
from postroom._wire.batch import PATH as BATCH
from postroom._wire.cloudevents import read_event
from postroom._wire.fingerprint import prefix
from postroom._wire.http import Head
from postroom._wire.ids import new_id, now_ms
from postroom._wire.message import MAX_REQUEST_BYTES, Envelope, PreparedSend, Priority, SendRequest, prepare, refuse
from postroom._wire.moment import from_milliseconds, to_milliseconds
from postroom._wire.operations import VERBS, SendsQuery
from postroom._wire.sends import SETTLED, BatchResult, OutboxRow, Ready, RowStatus, SendList, SendResult, Version
from postroom._wire.transport import JSON, NDJSON, Exchanges
from postroom.blocking import Client
from postroom.client import AsyncClient
from postroom.errors import PROBLEM_JSON, Conflict, NotFound, PostroomError

Outcome = Literal["done", "dead", "aborted"]

_UID: Final = 1000  # the sender of all of them
_SEND: Final = re.compile(r"/v1/sends/([^/]+)")
_PAUSE_SECONDS: Final = 0.01  # in which a test may settle what is waited for
_Pause = Callable[[float], Awaitable[None]]


class Sent(msgspec.Struct, kw_only=True, frozen=True):
    """A message that a fake daemon kept: what the real one would have written to its outbox.

    `body` is always bytes; `meta` is without the mentions, which are sorted, each once.
    """

    client_message_id: str
    to: str
    body: bytes
    meta: dict[str, Any]
    mentions: list[str]
    priority: Priority
    reply_to: str | None
    not_before: datetime | None  # UTC
    traceparent: str | None
    envelope: Envelope

    @property
    def text(self) -> str:
        """The body as text; raises `UnicodeDecodeError` where it is not UTF-8."""
        return self.body.decode()

    def json(self) -> Any:
        """Decode the body as JSON; raises `msgspec.DecodeError` where it is not JSON."""
        return msgspec.json.decode(self.body)


class FakeDaemon:
    """A daemon in memory, for any number of fake clients, in any threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, _Row] = {}  # by client_message_id, in the order they were sent
        self._history_ids = count(1)
        self._failure: PostroomError | None = None

    @property
    def sent(self) -> list[Sent]:
        """What was sent, in order; a repeated send is there once."""
        return [_sent(row.send) for row in list(self._rows.values())]

    def settle(self, client_message_id: UUID | str, status: Outcome = "done", *, reason: str | None = None) -> None:
        """Settle a send as if the broker had accepted it, or refused it for a `reason`, or an operator had aborted it.

        Raises `NotFound` where nothing was sent under that id, `InvalidMessage` for another status, and `Conflict` for
        a send that has ended: one that is dead may be aborted, and any other stays as it is.
        """
        if status not in SETTLED:
            refuse("invalid_field", f"a send is never {status!r} in the end: give done, dead or aborted", "status")
        with self._lock:
            row = self._row(str(client_message_id))
            if row.status in SETTLED and not (status == "aborted" and row.status in VERBS["abort"].states):
                sentence = f"the send {row.send.client_message_id} is {row.status}: it cannot become {status}"
                raise Conflict.of("wrong_state", sentence)
            self._settle(row, status, reason)

    @contextmanager
    def failing(self, error: PostroomError) -> Iterator[None]:
        """Answer everything with `error` within the block: `TryAgain.of("outbox_full", "the disk is full")`."""
        before, self._failure = self._failure, error
        try:
            yield
        finally:
            self._failure = before

    def _settle(self, row: _Row, status: Outcome, reason: str | None) -> None:
        row.status, row.last_error, row.settled_at = status, reason, now_ms()
        if status == "done":
            row.broker_message_id, row.history_id = str(uuid4()), next(self._history_ids)

    def _row(self, client_message_id: str) -> _Row:
        try:
            return self._rows[client_message_id]
        except KeyError:
            sentence = f"nothing was sent under the id {client_message_id!r}"
            raise NotFound.of("send_not_found", sentence) from None

    def _accept(self, message: bytes | SendRequest, traceparent: str | None = None) -> tuple[int, SendResult]:
        send = prepare(message, traceparent=traceparent)
        with self._lock:
            row = self._rows.get(send.client_message_id)
            if inserted := row is None:
                row = self._rows[send.client_message_id] = _Row(send)
            answered = answer(row.accepted(inserted=inserted), send, _UID)
        if isinstance(answered, PostroomError):
            raise answered
        return answered.http_status, answered.result

    async def _where(self, client_message_ids: list[str], wait: float, pause: _Pause) -> list[OutboxRow]:
        rows = [self._rows[each] for each in client_message_ids if each in self._rows]
        if wait and self._settle_due(rows):
            await pause(min(wait, _PAUSE_SECONDS))  # the client asks again
        with self._lock:
            return [row.shown() for row in rows]

    def _settle_due(self, rows: list[_Row]) -> bool:
        """Settle what is due, and return whether something is not."""
        with self._lock:
            unsettled = [row for row in rows if row.status not in SETTLED]
            due = [row for row in unsettled if row.due <= now_ms()]
            for row in due:
                self._settle(row, "done", None)
            return len(due) < len(unsettled)

    async def _answer(self, request: bytes, pause: _Pause) -> tuple[int, Any]:
        line, headers, body = _parsed(request)
        _check_size(body)
        method, target, _ = line.split(" ")
        url, traceparent = urlsplit(target), headers.get("traceparent")
        query = parse_qs(url.query, keep_blank_values=True)
        match method, url.path:
            case "POST", "/v1/send":
                return self._accept(body, traceparent)
            case "POST", "/v1/cloudevents":
                return self._accept(read_event(headers, body).message(query["to"][0]), traceparent)
            case "POST", "/v1/sends":
                asked = msgspec.json.decode(body, type=SendsQuery)
                found = await self._where(asked.client_message_ids, asked.wait, pause)
                known = {row.client_message_id for row in found}
                return 200, SendList(rows=found, missing=[x for x in asked.client_message_ids if x not in known])
            case "GET", path if matched := _SEND.fullmatch(path):
                self._row(client_message_id := unquote(matched[1]))
                (row,) = await self._where([client_message_id], float(query.get("wait", ["0"])[0]), pause)
                return 200, row
            case "GET", "/v1/ready":
                return 200, Ready(ready=True)
            case "GET", "/v1/version":
                return 200, Version(name="postroomd", version="fake", mesh="demo")
        sentence = f"a FakeClient answers sends and questions about them, not {method} {url.path}: use `mailroom`"
        raise PostroomError.of("not_faked", sentence, status=501)

    def _line(self, number: int, data: bytes, traceparent: str | None) -> BatchResult:
        try:
            _check_size(data)
            return BatchResult(line=number, result=self._accept(data, traceparent)[1])
        except PostroomError as error:
            return BatchResult(line=number, problem=error.problem)


class _Row:
    """A row of the outbox; its times are in ms since the epoch, as the daemon keeps them."""

    def __init__(self, send: PreparedSend) -> None:
        self.send = send
        self.row_id = new_id()
        self.enqueued_at = now_ms()
        self.not_before = None if send.not_before is None else to_milliseconds(send.not_before)
        self.due = max(self.enqueued_at, self.not_before or 0)
        self.status: RowStatus = "pending"
        self.settled_at: int | None = None
        self.broker_message_id: str | None = None
        self.history_id: int | None = None
        self.last_error: str | None = None

    def accepted(self, *, inserted: bool) -> AcceptedRow:
        return AcceptedRow(
            inserted,
            self.row_id,
            self.status,
            self.send.fingerprint,
            self.send.destination,
            self.enqueued_at,
            _UID,
            self.broker_message_id,
            self.history_id,
            self.last_error,
        )

    def shown(self) -> OutboxRow:
        at = {
            "enqueued_at": self.enqueued_at,
            "next_attempt_at": self.due,
            "not_before": self.not_before,
            "delivered_at": self.settled_at if self.status == "done" else None,
            "aborted_at": self.settled_at if self.status == "aborted" else None,
        }
        times: dict[str, Any] = {name: from_milliseconds(ms) for name, ms in at.items() if ms is not None}
        return OutboxRow(
            id=self.row_id,
            client_message_id=self.send.client_message_id,
            status=self.status,
            destination=self.send.destination,
            priority=self.send.priority,
            attempts=int(self.status in ("done", "dead")),
            request_fingerprint=prefix(self.send.fingerprint),
            payload_bytes=len(self.send.payload),
            last_error=self.last_error,
            broker_message_id=self.broker_message_id,
            history_id=self.history_id,
            submitted_by=f"{_UID}:{_UID}",
            **times,
        )


class _Fake(Exchanges):
    """The transport of a fake client: a function call."""

    def __init__(self, daemon: FakeDaemon, pause: _Pause) -> None:
        self._daemon = daemon
        self._pause = pause
        self._closed = False

    async def exchange(
        self, request: bytes, *, seconds: float, connecting: float, limit: int, repeatable: bool
    ) -> tuple[Head, bytes]:
        """Answer a request."""
        del seconds, connecting, limit, repeatable
        self._check_open()
        try:
            status, content = await self._daemon._answer(request, self._pause)  # noqa: SLF001 - the two are one thing
        except PostroomError as error:
            return _head(error.problem.status, PROBLEM_JSON), msgspec.json.encode(error.problem)
        return _head(status, JSON), msgspec.json.encode(content)

    @asynccontextmanager
    async def stream(
        self, request: bytes, body: AsyncGenerator[bytes, None], *, connecting: float, silence: float
    ) -> AsyncIterator[tuple[Head, _Lines]]:
        """Answer a batch, piece by piece; no other stream is faked."""
        del connecting, silence
        self._check_open()
        if not request.startswith(f"POST {BATCH} ".encode()):
            await self._daemon._answer(request, self._pause)  # noqa: SLF001 - which refuses it
        _, headers, _ = _parsed(request)
        answer_line = partial(self._daemon._line, traceparent=headers.get("traceparent"))  # noqa: SLF001
        yield _head(200, NDJSON), _Lines(body, answer_line)

    async def close(self) -> None:
        """Refuse later calls, as the real one does; what was sent can still be read."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this client is closed")
        if (failure := self._daemon._failure) is not None:  # noqa: SLF001
            raise copy(failure)  # each call has an error of its own, with its id


class _Lines:
    """The answer to a batch: for each piece of the request the answers to the lines that it completes."""

    def __init__(self, body: AsyncGenerator[bytes, None], answer_line: Callable[[int, bytes], BatchResult]) -> None:
        self._body = body
        self._answer = answer_line
        self._number = 0

    async def read(self, _seconds: float) -> bytes:
        piece = await anext(self._body, b"")
        first, self._number = self._number, self._number + piece.count(b"\n")
        results = (self._answer(number, line) for number, line in enumerate(piece.splitlines(), first + 1))
        return b"".join(msgspec.json.encode(result) + b"\n" for result in results)


class FakeAsyncClient(AsyncClient):
    """An `AsyncClient` whose messages stay in memory; share a `daemon` to see what several clients sent."""

    def __init__(self, daemon: FakeDaemon | None = None) -> None:
        self.daemon = _daemon(daemon)
        super().__init__("fake", patience=0)

    @property
    def sent(self) -> list[Sent]:
        """What was sent to its daemon, in order; a repeated send is there once."""
        return self.daemon.sent

    def _pool(self, path: str) -> Exchanges:
        del path
        return _Fake(self.daemon, self._pause)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class _Requests(FakeAsyncClient):
    """A `FakeAsyncClient` for programs without an event loop."""

    async def _pause(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - there is no loop


class FakeClient(Client):
    """A `Client` whose messages stay in memory; share a `daemon` to see what several clients sent."""

    def __init__(self, daemon: FakeDaemon | None = None) -> None:
        self.daemon = _daemon(daemon)
        self._use(_Requests(self.daemon), partial(FakeAsyncClient, self.daemon))

    @property
    def sent(self) -> list[Sent]:
        """What was sent to its daemon, in order; a repeated send is there once."""
        return self.daemon.sent


def _daemon(given: Any) -> FakeDaemon:
    if given is None:
        return FakeDaemon()
    if not isinstance(given, FakeDaemon):
        sentence = f"a fake client has no socket: give a FakeDaemon, or nothing, not {given!r}"
        refuse("invalid_field", sentence, "daemon")
    return given


def _parsed(request: bytes) -> tuple[str, dict[str, str], bytes]:
    """Return the first line of a request, its headers by their names in lower case, and its body."""
    head, _, body = request.partition(b"\r\n\r\n")
    line, *lines = head.decode().split("\r\n")
    return line, {name.lower(): value.strip() for name, _, value in (each.partition(": ") for each in lines)}, body


def _check_size(data: bytes) -> None:
    if len(data) > MAX_REQUEST_BYTES:
        size = f"the request has {len(data)} bytes, the limit is {MAX_REQUEST_BYTES}"
        refuse("request_too_large", f"{size}: send less, or raise limits.request_bytes")


def _head(status: int, media: str) -> Head:
    return Head(status, media, length=None, chunked=False, closes=False)


def _sent(send: PreparedSend) -> Sent:
    envelope = msgspec.json.decode(send.payload, type=Envelope)
    meta: Mapping[str, Any] = envelope.meta or {}
    return Sent(
        client_message_id=send.client_message_id,
        to=send.destination,
        body=envelope.body_bytes(),
        meta={name: value for name, value in meta.items() if name != "mentions"},
        mentions=envelope.mentions(),
        priority=envelope.priority,
        reply_to=envelope.reply_to,
        not_before=send.not_before,
        traceparent=envelope.traceparent,
        envelope=envelope,
    )
