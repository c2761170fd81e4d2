"""`AsyncClient`: send messages to the daemon of this machine, and ask for their state.

Every send carries an id that is minted before the first try, so that a repeated request (after a refused or broken
connection, 429, 503, 507) can't become a second message: the daemon's outbox row under that id makes the second try
a no-op (docs/contract/send.md#send-37).
"""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from postroom._wire import arguments, spans
from postroom._wire.administration import Subscription, Topic, TopicList
from postroom._wire.cloudevents import MOST_IN_A_HEADER, MOST_IN_HEADERS, STRUCTURED, read_event
from postroom._wire.message import Priority, SendRequest, refuse
from postroom._wire.nouns import OPERATOR_LOG, LogPage, LogQuery
from postroom._wire.operations import (
    MAX_WAIT,
    VERBS,
    BackupRequest,
    BulkRequest,
    ListQuery,
    PauseRequest,
    PruneRequest,
    PruneResult,
    ResendRequest,
    ResendResult,
    ResumeRequest,
    RowFilter,
    SendsQuery,
    Verb,
    WaitQuery,
)
from postroom._wire.retry import Patience
from postroom._wire.sends import (
    MAX_PAGE,
    SETTLED,
    BatchResult,
    BulkResult,
    EventsQuery,
    Health,
    InboxMessage,
    InboxPage,
    InboxQuery,
    OutboxPage,
    OutboxRow,
    Ready,
    RelayStatus,
    RowChain,
    SendList,
    SendResult,
    Version,
)
from postroom._wire.trace import Story, TraceQuery
from postroom._wire.transport import NDJSON, SQLITE, Calls, Exchanges, Peer, Transport, find_socket, to_parameters
from postroom.errors import NotFound, PostroomError

__all__ = ["AsyncClient"]


class AsyncClient(Calls):
    """A client of the daemon that listens on `socket` (default: `POSTROOM_SOCKET`, or the only one on this machine).

    One exchange may take `timeout` seconds (more than 0); requests that may be repeated are, for `patience` seconds (0:
    one try). Raises `InvalidMessage` for other numbers.
    Use it in one event loop, as a context manager or with `close`.
    """

    def __init__(self, socket: Path | str | None = None, *, timeout: float = 10.0, patience: float = 30.0) -> None:
        arguments.check_seconds(timeout, patience)
        path = find_socket(socket)
        peer = Peer("daemon", str(path), "start one (`postroom up`, `postroom daemon run`), or set POSTROOM_SOCKET")
        super().__init__(Transport(self._pool(str(path)), "http://localhost", peer, timeout), patience)

    def _pool(self, path: str) -> Exchanges:
        from postroom._wire.connections import Pool, unix_dial  # noqa: PLC0415 - the blocking client needs no asyncio

        return Pool(unix_dial(path))

    async def send(
        self,
        to: str,
        body: arguments.Body = None,
        *,
        meta: Mapping[str, Any] | None = None,
        priority: Priority = "next",
        reply_to: str | None = None,
        mentions: Sequence[str] | None = None,
        client_message_id: UUID | str | None = None,
        not_before: datetime | None = None,
        traceparent: str | None = None,
    ) -> SendResult:
        """Send one message; when this returns, the message is on disk and will be sent whatever happens.

        `body` is text, bytes, or a dict or a list, which is sent as JSON (`msgspec.to_builtins` makes one of a class).
        Raises `InvalidMessage`, `Conflict` (the id is taken), `NotPermitted`, `TryAgain` or `Unavailable`; after the
        last two the message may still have been kept: send it again under the error's `client_message_id`.
        """
        request = arguments.compose(
            to,
            body,
            meta=meta,
            priority=priority,
            reply_to=reply_to,
            mentions=mentions,
            client_message_id=client_message_id,
            not_before=not_before,
        )
        data = arguments.encode(request)
        given = None if traceparent is None else arguments.check_traceparent(traceparent)
        try:
            with spans.sending(to, request.client_message_id, given) as span:
                headers = {} if span.traceparent is None else {"traceparent": span.traceparent}
                return await self._repeat("POST", "/v1/send", SendResult, body=data, headers=headers)
        except PostroomError as error:
            error.client_message_id = request.client_message_id
            raise

    async def send_cloudevent(self, to: str, headers: Mapping[str, str], body: bytes) -> SendResult:
        """Send one CloudEvent in the form of its HTTP binding, in structured or binary mode.

        The data is the message's body, the attributes are `meta.cloudevent`, and the id follows from `source` and `id`:
        an event that is sent twice is one message. Raises what `send` raises.
        """
        event = read_event(arguments.check_headers(headers), arguments.check_bytes(body))
        attributes, data, media = event.headers(), event.data, event.media
        longest = max(map(len, (media, *attributes.values())))
        if len(attributes) > MOST_IN_HEADERS or longest > MOST_IN_A_HEADER:
            attributes, data, media = {}, event.structured(), STRUCTURED  # which no limit of a head refuses
        with spans.sending(to, None, None) as span:
            attributes |= {} if span.traceparent is None else {"traceparent": span.traceparent}
            how = {"query": {"to": to}, "headers": attributes, "media": media}
            return await self._repeat("POST", "/v1/cloudevents", SendResult, body=data, **how)

    async def send_many(
        self, messages: Iterable[SendRequest] | AsyncIterable[SendRequest], *, traceparent: str | None = None
    ) -> AsyncGenerator[BatchResult, None]:
        """Send any number of messages as a stream, and yield one result for each as it arrives.

        All of them have the `traceparent`.

        `line` counts the messages from 1. Messages without an id get one; a broken connection is resumed. A message
        that is refused yields a `problem`; an error that stops the stream is raised, and then every message without
        a result may be sent again under its own id.
        """
        async with aclosing(self.send_many_in_chunks(messages, traceparent=traceparent)) as chunks:
            async for results in chunks:
                for result in results:
                    yield result

    async def send_many_in_chunks(
        self, messages: Iterable[SendRequest] | AsyncIterable[SendRequest], *, traceparent: str | None = None
    ) -> AsyncGenerator[list[BatchResult], None]:
        """Do as `send_many` does, but yield the results that arrived together as one list."""
        from postroom._wire.batch import Batch, feed  # noqa: PLC0415 - nor does it, unless it streams

        given, count = None if traceparent is None else arguments.check_traceparent(traceparent), 0
        with spans.sending(None, None, given) as span:
            headers = {} if span.traceparent is None else {"traceparent": span.traceparent}
            async with aclosing(feed(messages)) as source:
                batch = Batch(self._transport, source, self._patience(), headers)
                async with aclosing(batch.results()) as chunks:
                    async for results in chunks:
                        count += len(results)
                        span.set("messaging.batch.message_count", count)
                        yield results

    async def get(self, client_message_id: UUID | str) -> OutboxRow:
        """Return the state of a send; raises `NotFound`."""
        return await self._read(arguments.path_of("sends", client_message_id), OutboxRow)

    async def wait(self, client_message_id: UUID | str, timeout: float) -> OutboxRow:  # noqa: ASYNC109 - the daemon waits
        """Wait until a send is `done`, `dead` or `aborted`, at most `timeout` seconds; return its state."""
        patience = Patience(arguments.check_wait(timeout, "timeout"))
        path = arguments.path_of("sends", client_message_id)
        while True:
            seconds = min(patience.remaining(), MAX_WAIT)
            row = await self._read(path, OutboxRow, query=WaitQuery(wait=seconds), waiting=seconds)
            if row.status in SETTLED or not patience.remaining():
                return row

    async def wait_many(self, client_message_ids: Iterable[UUID | str], timeout: float) -> list[OutboxRow]:  # noqa: ASYNC109 - the same
        """Do as `wait` does, for any number of sends with few requests; return them in the same order.

        Raises `NotFound` with the id of a send that does not exist.
        """
        if isinstance(client_message_ids, str):
            sentence = f"client_message_ids must be a list of ids, as in [{client_message_ids!r}]"
            refuse("invalid_field", sentence, "client_message_ids")
        every = [arguments.check_id(each) for each in client_message_ids]
        patience, rows = Patience(arguments.check_wait(timeout, "timeout")), list[OutboxRow]()
        for start in range(0, len(every), MAX_PAGE):
            ids = every[start : start + MAX_PAGE]
            found: dict[str, OutboxRow] = {}
            while unsettled := [each for each in ids if each not in found or found[each].status not in SETTLED]:
                seconds = min(patience.remaining(), MAX_WAIT)
                query = SendsQuery(client_message_ids=unsettled, wait=seconds)
                answer = await self._read("/v1/sends", SendList, body=query, waiting=seconds)
                if answer.missing:
                    raise NotFound.of("send_not_found", f"there is no send under the id {answer.missing[0]!r}")
                found |= {row.client_message_id: row for row in answer.rows}
                if not patience.remaining():
                    break
            rows += [found[each] for each in ids]
        return rows

    async def inbox(self, query: InboxQuery | None = None) -> InboxPage:
        """Return one page of what the daemon has received, oldest first."""
        return await self._read("/v1/inbox", InboxPage, query=query or InboxQuery())

    async def events(
        self, query: EventsQuery | None = None, *, after: int | None = None, patience: float | None = None
    ) -> AsyncGenerator[InboxMessage, None]:
        """Yield each message that the daemon receives, without end: after a `position`, or by `query`.

        A connection that breaks is opened again, and the stream resumes where it was: nothing is lost or repeated.
        Raises when there was no answer for `patience` seconds (default: the client's own).
        """
        from postroom._wire.events import EventStream  # noqa: PLC0415 - the same

        seconds = self._patience_seconds if patience is None else arguments.check_wait(patience, "patience")
        following = EventStream(self._transport, query or EventsQuery(), after, Patience(seconds))
        async with aclosing(following.messages()) as messages:
            async for message in messages:
                yield message

    async def health(self) -> Health:
        """Return the daemon's health: ok, or `degraded` with the reasons."""
        return await self._read("/v1/health", Health)

    async def ready(self) -> Ready:
        """Check that the daemon would accept a send now; raises `TryAgain` where it would not."""
        return await self._read("/v1/ready", Ready)

    async def version(self) -> Version:
        """Return the daemon's version and the mesh that it serves."""
        return await self._read("/v1/version", Version)

    # What an operator may do: an id is a row's id or a `client_message_id`; the `reason` is kept. A change is tried
    # again only where it certainly did not happen; where that is unknown, `Unavailable` is raised.

    async def list_rows(self, query: ListQuery | None = None) -> OutboxPage:
        """Return one page of the outbox, oldest first."""
        return await self._read("/v1/outbox", OutboxPage, query=query or ListQuery())

    async def export(self, query: ListQuery | None = None) -> AsyncGenerator[OutboxRow, None]:
        """Stream every row that `query` selects, oldest first; raises `Unavailable` where the stream breaks off."""
        async with aclosing(self.export_in_chunks(query)) as chunks:
            async for rows in chunks:
                for row in rows:
                    yield row

    async def export_in_chunks(self, query: ListQuery | None = None) -> AsyncGenerator[list[OutboxRow], None]:
        """Do as `export` does, but yield the rows that arrived together as one list."""
        parameters = to_parameters(query or ListQuery())
        async with self._transport.open("GET", "/v1/outbox/export", query=parameters, expected=NDJSON) as answer:
            async for lines in self._transport.lines(answer):
                yield [self._transport.decode(line, OutboxRow) for line in lines]

    async def inspect(self, row_id: str) -> RowChain:
        """Return a row with its predecessors and successors and what operators did to them."""
        return await self._read(_row(row_id), RowChain)

    async def log(self, query: LogQuery | None = None) -> LogPage:
        """Return what operators did to rows and to the relay, the latest first."""
        return await self._read(OPERATOR_LOG.path, LogPage, query=query or LogQuery())

    async def trace(self, id_: str, sender: str | None = None) -> Story:
        """Return what the daemon knows of a row or a message, also of one that it received from `sender`."""
        return await self._read(arguments.path_of("trace", id_), Story, query=TraceQuery(sender=sender))

    async def act(
        self,
        verb: Verb,
        row_id: str,
        *,
        reason: str,
        force: bool = False,
        new_client_message_id: str | None = None,
        message: SendRequest | None = None,
    ) -> OutboxRow:
        """Do a verb of `postroom._wire.operations.VERBS` to one row, and return the row.

        A requeue returns the successor, under a fresh id or `new_client_message_id`, with the row's message or
        `message`. Raises `Conflict` where the row's state forbids the verb; a verb that would retire the row also
        raises `already_accepted` if the broker turns out to have the message, and, without `force`, `outcome_unknown`
        if the broker may have it and cannot be asked.
        """
        arguments.check_verb(verb, VERBS)
        options = {"force": force, "new_client_message_id": new_client_message_id, "message": message}
        given: dict[str, Any] = {name: value for name, value in options.items() if value not in (None, False)}
        if isinstance(message, SendRequest):
            arguments.encode(message)  # which refuses what JSON would change
        body = VERBS[verb].body
        if not given.keys() <= set(body.__struct_fields__):
            names = ", ".join(sorted(given.keys() - set(body.__struct_fields__)))
            refuse("invalid_field", f"{verb} takes no {names}: omit it", names.partition(",")[0])
        return await self._change("POST", f"{_row(row_id)}/{verb}", OutboxRow, body(reason=reason, **given))

    async def bulk(
        self, verb: Verb, rows: RowFilter, *, reason: str, dry_run: bool = False, force: bool = False
    ) -> BulkResult:
        """Do a verb to every row that `rows` selects; with `dry_run`, only return to which.

        One request covers some 10,000 rows; what it did stays done where a later one fails.
        """
        arguments.check_verb(verb, VERBS)
        total = BulkResult(dry_run=dry_run, matched=0, done=[], skipped=[], failed=[])
        asked = BulkRequest(reason=reason, filter=rows, force=force, dry_run=dry_run)
        while True:
            part = await self._change("POST", f"/v1/outbox/{verb}", BulkResult, asked)
            total.matched += part.matched
            total.done += part.done
            total.skipped += part.skipped
            total.failed += part.failed
            if part.next_cursor is None:
                return total
            asked = replace(asked, cursor=part.next_cursor)

    async def prune(
        self, older_than_seconds: float | None = None, *, reason: str, tell: Callable[[int], None] | None = None
    ) -> PruneResult:
        """Empty the payloads of `done` and `aborted` rows that are older than this; the rows stay.

        Without an age it is `outbox.keep_payloads` of the daemon. One request covers some 100,000 rows; what it did
        stays done where a later one fails. `tell` is called after each with the number of payloads so far.
        """
        total, cursor = PruneResult(pruned=0), 0
        while True:
            body = PruneRequest(reason=reason, older_than_seconds=older_than_seconds, cursor=cursor)
            part = await self._change("POST", "/v1/outbox/prune", PruneResult, body)
            total.pruned += part.pruned
            if tell is not None:
                tell(total.pruned)
            if part.next_cursor is None:
                return total
            cursor = part.next_cursor

    async def resend_missing(
        self, *, reason: str, dry_run: bool = False, tell: Callable[[int], None] | None = None
    ) -> ResendResult:
        """Send the messages that the broker's database lost again, under their own ids; `health` counts them.

        Those whose payload was deleted are returned by id, and noted in the operator log. One request covers some
        10,000; what it did stays done where a later one fails. `tell` is called after each with the number so far.
        """
        total = ResendResult(dry_run=dry_run, resent=0, without_payload=0)
        more = True
        while more:
            body = ResendRequest(reason=reason, dry_run=dry_run)
            part = await self._change("POST", "/v1/outbox/resend", ResendResult, body)
            total.resent += part.resent
            total.without_payload += part.without_payload
            total.without_payload_ids += part.without_payload_ids
            if tell is not None:
                tell(total.resent + total.without_payload)
            more = part.more
        return total

    async def backup(self, *, reason: str) -> AsyncIterator[bytes]:
        """Stream a copy of the whole outbox, payloads too, as it is once the first bytes come: an SQLite file.

        The daemon first makes the copy, while it goes on with sends, and may take `timeout` seconds for it. Raises
        `Unavailable` where the stream breaks off.
        """

        async def data() -> AsyncGenerator[bytes, None]:
            yield msgspec.json.encode(BackupRequest(reason=reason))

        async with self._transport.open("POST", "/v1/outbox/backup", data=data(), expected=SQLITE) as answer:
            while piece := await answer.read(self._transport.timeout):
                yield piece

    async def pause_relay(self, destination: str | None = None, *, reason: str) -> RelayStatus:
        """Stop relaying, to one destination or to all, until it is resumed; restarts do not change that."""
        request = PauseRequest(reason=reason, destination=destination)
        return await self._change("POST", "/v1/relay/pause", RelayStatus, request)

    async def resume_relay(
        self, destination: str | None = None, *, reason: str, rate_per_second: float | None = None
    ) -> RelayStatus:
        """Relay again, at most `rate_per_second` messages a second where it is given."""
        body = ResumeRequest(reason=reason, destination=destination, rate_per_second=rate_per_second)
        return await self._change("POST", "/v1/relay/resume", RelayStatus, body)

    async def topics(self) -> list[Topic]:
        """Return the topics of the daemon's mesh, by name, as the broker has them."""
        return (await self._read("/v1/topics", TopicList)).topics

    async def subscribe(self, topic: str) -> Subscription:
        """Subscribe the daemon's member to a topic."""
        return await self._change("POST", arguments.path_of("topics", topic, "subscription"), Subscription)

    async def unsubscribe(self, topic: str) -> None:
        """End the subscription of the daemon's member to a topic."""
        await self._change("DELETE", arguments.path_of("topics", topic, "subscription"), type(None))


def _row(row_id: str) -> str:
    """Return the path of a row; unless a letter is escaped, that of the id `export` is the route of all rows."""
    return f"/v1/outbox/{arguments.segment(row_id).replace('export', '%65xport')}"
