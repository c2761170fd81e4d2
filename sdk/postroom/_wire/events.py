"""Following a daemon's inbox: server-sent events, resumed by `Last-Event-ID` whenever the connection breaks."""

from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import aclosing
from typing import Final

from postroom._wire.message import MAX_BODY_BYTES
from postroom._wire.retry import Patience
from postroom._wire.sends import EventsQuery, InboxMessage
from postroom._wire.transport import EVENT_STREAM, Transport, to_parameters
from postroom.errors import PostroomError

SILENCE_SECONDS: Final = 60.0  # without even a heartbeat, after which the connection counts as broken
_LONGEST_LINE: Final = 8 * MAX_BODY_BYTES  # of one message's JSON


class EventStream:
    """One stream of messages, over as many connections as it takes."""

    def __init__(self, transport: Transport, query: EventsQuery, after: int | None, patience: Patience) -> None:
        """Begin after the position `after`, else as `query` says."""
        self._transport = transport
        self._parameters = to_parameters(query)
        self._last_event_id = None if after is None else str(after)
        self._patience = patience
        self._event: dict[bytes, bytes] = {}  # the fields of the one that is being read

    async def messages(self) -> AsyncGenerator[InboxMessage, None]:
        """Yield each message once, for ever; raises what trying again can't fix, and once patience ends."""
        while True:
            error: PostroomError = self._transport.peer.lost()  # an answer that ends is a daemon that stops
            try:
                async with aclosing(self._connection()) as messages:
                    async for message in messages:
                        yield message
            except PostroomError as raised:
                error = raised
            await self._patience.pause(error)

    async def _connection(self) -> AsyncGenerator[InboxMessage, None]:
        self._event = {}
        headers = {} if self._last_event_id is None else {"Last-Event-ID": self._last_event_id}
        async with self._transport.open(
            "GET", "/v1/events", query=self._parameters, headers=headers, expected=EVENT_STREAM
        ) as answer:
            async for lines in self._transport.lines(answer, longest=_LONGEST_LINE, silence=SILENCE_SECONDS):
                self._patience.restart()
                for message in self._read(lines):
                    yield message

    def _read(self, lines: Iterable[bytes]) -> Iterator[InboxMessage]:
        """Take the message of each event; one without only says how far the stream has come.

        Nothing counts before the empty line that ends an event: a connection may break within one.
        """
        for line in lines:
            if line:
                name, _, value = line.partition(b": ")
                self._event[name] = value
                continue
            event, self._event = self._event, {}
            if b"id" in event:
                self._last_event_id = event[b"id"].decode()
            if b"data" in event:
                yield self._transport.decode(event[b"data"], InboxMessage)
