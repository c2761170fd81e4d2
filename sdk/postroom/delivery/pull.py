"""The pull side of a durable consumer: asks for messages while there is room, and notices when they stop coming.

nats-py's own `fetch` waits for one request at a time; here several are under way, so that the server never idles. The
server may stop, pause, lose its store, or have the stream or the consumer deleted: after every silence or bad status
the consumer is looked up again, created where it is missing, and asked again.

A consumer that was created again counts its messages from one, so an ack for a message of the old one could settle a
message of the new one that no handler has seen. Therefore each message remembers when its consumer was created
(`epoch`), and nothing is sent for a message of another epoch, nor while it is unknown which consumer exists.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import Final

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom._wire.words import counted
from postroom.chassis.runtime import in_step, within
from postroom.delivery.errors import NATS_ERRORS, from_nats, mapped
from postroom.delivery.nats import FROM_A_STREAM, NatsClient, api_subject, connection_of, end_if_cancelled
from postroom.delivery.settings import ConsumerSettings, StreamSettings
from postroom.delivery.streams import consumer_created, ensure_consumer, ensure_stream
from postroom.errors import Conflict, NotFound, PostroomError, Unavailable

_log = structlog.get_logger(__name__)

EXPIRES_SECONDS: Final = 30.0  # how long the server keeps a request that it cannot fill
HEARTBEAT_SECONDS: Final = 2.0  # how often it sends a heartbeat meanwhile
SILENCE_SECONDS: Final = 2.5 * HEARTBEAT_SECONDS  # after which the server counts as unreachable
TICK_SECONDS: Final = 0.5  # how often the connection is checked
STOP_SECONDS: Final = 2.0  # longest wait for what the server has sent before it heard of a stop
RETRY_SECONDS: Final = 1.0  # pause after a look at the consumer that failed
WATCH_SECONDS: Final = 30.0  # between two checks whether waiting messages are delivered
_NANOSECONDS: Final = 1_000_000_000
_BUFFER_MESSAGES: Final = 1_000_000  # held by the client; the real limit is what was asked for

_HEARTBEAT: Final = "100"
_EXPIRED: Final = frozenset({"404", "408"})  # a request ended, and nothing is wrong


class Pull:
    """One subscription that receives what one durable consumer delivers to this process."""

    def __init__(
        self,
        js: JetStreamContext,
        settings: ConsumerSettings,
        stream: StreamSettings | None,
        *,
        room: Callable[[], int],
        paused: Callable[[], bool],
        receive: Callable[[Msg, datetime], None],
        made: Callable[[], Awaitable[None]],
    ) -> None:
        """`room` returns how many more messages can be taken; `receive` is called with each, and its epoch, at once.

        While it is `paused`, waiting messages are no trouble. `made` is called when the consumer was just created, and
        raises `NotFound` where it should not exist: then no messages are asked for.
        """
        self._js = js
        self._connection = connection_of(js)
        self._next = api_subject(js, f"CONSUMER.MSG.NEXT.{settings.stream}.{settings.durable}")
        self._settings = settings
        self._stream = stream
        self._room = room
        self._paused = paused
        self._receive = receive
        self._made = made
        self._subscription: Subscription | None = None
        self._epoch: datetime | None = None
        self._asked = 0  # messages that the server still owes us
        self._heard = 0.0  # when it last sent anything
        self._connects = -1  # reconnects of the connection when the consumer was last seen
        self._doubt = True
        self._delivered = -1  # messages, when that was last watched
        self._watched = 0.0
        self._stopped = False
        self._stopping = asyncio.Lock()
        self._trouble: str | None = None  # why nothing arrives
        self._denials = 0, 0  # of the connection at the watch before the last, and at the last
        self._wake = asyncio.Event()
        self._known = asyncio.Event()

    async def run(self) -> None:
        """Ask until stopped; raises `Unavailable` once the connection is closed, `Conflict` as `declare`."""
        inbox = self._connection.new_inbox()
        self._subscription = await self._connection.subscribe(
            inbox, cb=self._arrived, pending_msgs_limit=_BUFFER_MESSAGES, pending_bytes_limit=-1
        )
        while not self._stopped:
            end_if_cancelled()
            if self._connection.is_closed:
                raise Unavailable.of("nats_closed", "the connection to NATS was closed; start again")
            if self.sure:
                await self._ask(inbox)
                await self._watch()
                if await within(in_step(TICK_SECONDS), self._wake):
                    self._wake.clear()
            elif not await self._look() and await within(RETRY_SECONDS, self._wake):
                self._wake.clear()
        await self.stop()  # the caller closes the connection afterwards

    async def stop(self) -> None:
        """Ask for no more messages, and take none; another call returns when the first has ended."""
        self._stopped, self._asked = True, 0
        self._wake.set()
        self._known.set()
        async with self._stopping:
            subscription, self._subscription = self._subscription, None
            if subscription is None or self._connection.is_closed:
                return
            try:
                async with asyncio.timeout(STOP_SECONDS):  # what is on its way still arrives, and is handed back
                    await subscription.drain()  # type: ignore[no-untyped-call]
            except NATS_ERRORS:
                _log.info("pull_stopped_without_nats", consumer=self._settings.durable)

    def more(self) -> None:
        """Wake the loop, since there is room again."""
        self._wake.set()

    @property
    def sure(self) -> bool:
        """Whether the connection is up and the consumer is the one that was last seen."""
        silent = self._asked > 0 and _now() - self._heard > SILENCE_SECONDS
        known = self._connection.is_connected and self._connection.stats["reconnects"] == self._connects
        if self._doubt or silent or not known:
            self._doubt = True
            self._known.clear()
        return not self._doubt

    @property
    def trouble(self) -> str | None:
        """Why nothing arrives, or NATS lets this user not ask or acknowledge, to which it answers nothing."""
        if isinstance(self._connection, NatsClient):
            acks = f"{FROM_A_STREAM}{self._settings.stream}.{self._settings.durable}."
            for subject in (self._next, acks):
                if (error := self._connection.denied(subject, self._denials[0])) is not None:
                    return str(from_nats(error, f"consuming as {self._settings.durable}"))
        return self._trouble

    async def answer(self, reply: str, text: bytes, epoch: datetime) -> bool:
        """Send an ack of any kind for a message of `epoch`; False where its consumer was deleted, or created again.

        Waits while it is unknown whether the consumer exists. The server does not confirm: a lost ack is a redelivery,
        which every handler makes harmless.
        """
        while not self.sure:
            if self._connection.is_closed or (self._stopped and not await self._look()):
                return False
            await self._known.wait()
        if epoch != self._epoch or self._connection.is_closed:
            return False
        try:
            await self._connection.publish(reply, text)
        except NATS_ERRORS as error:
            _log.warning("ack_not_sent", consumer=self._settings.durable, error=str(error) or type(error).__name__)
            return False
        return True

    async def _look(self) -> bool:
        """Find the consumer, or create it; False where that failed, which is logged."""
        if not self._connection.is_connected:
            return False  # a request would only wait until it times out
        connects = self._connection.stats["reconnects"]
        try:
            epoch = await self._find()
        except PostroomError as error:
            if isinstance(error, Conflict) and not error.retryable:
                raise  # looking again changes nothing
            if self._trouble != (why := str(error)):  # and not at each look
                _log.warning("consumer_unavailable", consumer=self._settings.durable, detail=why, code=error.code)
            self._trouble = why
            return False
        if self._epoch not in (None, epoch):
            _log.warning("consumer_recreated", consumer=self._settings.durable, stream=self._settings.stream)
        self._epoch, self._connects, self._asked, self._heard = epoch, connects, 0, _now()
        self._doubt, self._trouble, self._delivered, self._watched = False, None, -1, _now()
        self._known.set()
        return True

    async def _watch(self) -> None:
        """Notice that messages wait and none is delivered, whatever the reason, and ask for them again."""
        if _now() - self._watched < WATCH_SECONDS:
            return
        self._watched = _now()
        if isinstance(self._connection, NatsClient):
            self._denials = self._denials[1], self._connection.denials
        try:
            info = await self._js.consumer_info(self._settings.stream, self._settings.durable)
        except (*NATS_ERRORS, NotFoundError):
            return  # `sure` notices the silence of the consumer
        before, self._delivered = self._delivered, 0 if info.delivered is None else info.delivered.consumer_seq
        if not info.num_pending or self._delivered != before or self._paused() or info.paused:
            self._trouble = None
            return
        waiting = counted(info.num_pending, "message waits", "messages wait")
        self._trouble = (
            f"{waiting} in {self._settings.stream} for {self._settings.durable}, and none was "
            f"delivered for {WATCH_SECONDS:g} s: {info.num_ack_pending} are claimed or wait for their next attempt"
        )
        _log.warning("consumer_stalled", consumer=self._settings.durable, detail=self._trouble)
        self._asked = 0

    async def _find(self) -> datetime:
        """Return when the consumer was created, which may be now; raises `PostroomError`."""
        with mapped(f"looking for the consumer {self._settings.durable}"):
            if self._epoch is not None:
                with suppress(NotFoundError):
                    created = await consumer_created(self._js, self._settings)
                    if created == self._epoch:
                        return created
            await self.declare()
            await self._made()
            return await consumer_created(self._js, self._settings)

    async def declare(self) -> None:
        """Create the consumer, or change it to its settings; raises `PostroomError`, as `ensure_consumer` does."""
        try:
            await ensure_consumer(self._js, self._settings)
        except NotFound:
            if self._stream is None:
                raise
            await ensure_stream(self._js, self._stream, only=())
            await ensure_consumer(self._js, self._settings)

    async def _ask(self, inbox: str) -> None:
        """Ask for as many messages as there is room for, but for few only where the server owes none."""
        room = self._room() - self._asked
        if room <= 0 or (self._asked and room < self._settings.max_ack_pending // 4):
            return
        request = {
            "batch": room,
            "expires": int(EXPIRES_SECONDS * _NANOSECONDS),
            "idle_heartbeat": int(HEARTBEAT_SECONDS * _NANOSECONDS),
        }
        if not self._asked:
            self._heard = _now()
        self._asked += room
        await self._connection.publish(self._next, json.dumps(request).encode(), reply=inbox)

    async def _arrived(self, message: Msg) -> None:
        self._heard = _now()
        if message.reply.startswith(FROM_A_STREAM):
            self._asked = max(0, self._asked - 1)
            if self._epoch is not None:
                self._receive(message, self._epoch)
            return
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            _log.warning("message_skipped", consumer=self._settings.durable, detail="it did not come from a stream")
        elif status != _HEARTBEAT:  # a request ended unfilled
            self._asked = max(0, self._asked - int(headers.get("Nats-Pending-Messages", self._asked)))
            if status in _EXPIRED:
                self._wake.set()
                return
            _log.info("pull_ended", consumer=self._settings.durable, status=status, reason=headers.get("Description"))
            self._doubt = True  # the loop looks at its next tick, so that a refused request is not repeated at once


def _now() -> float:
    return asyncio.get_running_loop().time()
