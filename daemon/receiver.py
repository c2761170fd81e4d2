"""The receiving half of the daemon: opens the inbox, fills it from JetStream, and starts over where anything fails.

Errors here never affect sending. A file that breaks is closed and opened again, which sets a damaged one aside; then
the durable consumer is a new one too, since its name contains the file's id: it acknowledges only what is in this file.
So each daemon of a member has a consumer of its own, and gets its own copy of everything.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from broker_client import BrokerClientSettings
from broker_client.channel import TokenFile
from inbox import Broken, Durable, Inbox, InboxSettings, unavailable
from postroom._wire import spans
from postroom._wire.accept import Features
from postroom._wire.administration import HistoryMessage, HistoryQuery
from postroom._wire.moment import from_milliseconds
from postroom._wire.retry import STEADY, Backoff
from postroom.broker import BrokerClient
from postroom.chassis.runtime import end, in_step, within
from postroom.claims import DONE, Dead
from postroom.delivery.consumer import Consumer, Handler, Settle
from postroom.delivery.dead_letters import StreamLetters
from postroom.delivery.errors import NATS_ERRORS
from postroom.delivery.message import Delivery
from postroom.delivery.nats import NatsClient, connect, trouble_of
from postroom.delivery.settings import ConsumerSettings, NatsSettings
from postroom.delivery.subjects import inbox_subject, stream_name
from postroom.errors import Gone, PostroomError

_log = structlog.get_logger(__name__)

_DAY_MS: Final = 86_400_000
_PRUNE_SECONDS: Final = 3600.0
_LOOK_SECONDS: Final = 1.0  # between two checks of the token's owner
_PAUSES: Final = Backoff(0.5, 60.0, least=STEADY)  # before the inbox is opened again
_ACK_WAIT: Final = 5.0  # seconds: what a killed daemon had in hand is redelivered soon
_BATCH: Final = 200  # messages that share a transaction
_CLOSE_SECONDS: Final = 5.0  # longest wait for the batches in hand where the inbox has failed
_MEMBER_CHARACTERS: Final = 32  # of a durable's name, which has 64 at most
_RETRY_SECONDS: Final = 1.0  # between two tries to write to a full disk
_OPENING: Final = "postroom-inbox-opening"  # in the metadata of a durable
_PAGE: Final = 200  # messages of the history asked for, and filed, at once

_decode: Final = msgspec.json.Decoder(HistoryMessage).decode


class Receiver:
    """Runs the inbox of one daemon: `run` it as a task, `stop` it before that task is cancelled."""

    def __init__(
        self,
        nats: NatsSettings,
        broker: BrokerClientSettings,
        settings: InboxSettings,
        *,
        mesh: str,
        state_directory: Path,
        features: Callable[[], Features | None],
        confirmed_time: Callable[[], Awaitable[int]],
    ) -> None:
        """`features` returns the broker's features, which name the token's owner, None until they are known.

        `confirmed_time` returns the time in ms since the epoch, once the clock can be trusted.
        """
        self._nats = nats
        self._broker = broker
        self._settings = settings
        self._mesh = mesh
        self._state_directory = state_directory
        self._features = features
        self._confirmed_time = confirmed_time
        self.counters = FilingCounters()
        self.inbox: Inbox | None = None
        self._connection: Client | None = None
        self._consumer: Consumer | None = None
        self._pulling: asyncio.Task[None] | None = None
        self._handler: InboxHandler | None = None
        self._member: str | None = None  # whose messages are being pulled
        self._trouble: str | None = "it is being opened"
        self._stopping = False

    def opened(self) -> Inbox:
        """Return the inbox; raises `TryAgain` (503) while it is not open."""
        if self.inbox is None:
            raise unavailable(self._trouble or "it is being opened")
        return self.inbox

    def trouble(self) -> str | None:
        """Return what keeps messages from arriving, None where nothing does."""
        if self._trouble is not None:
            return self._trouble
        if self._handler is not None and self._handler.trouble is not None:
            return self._handler.trouble
        if self._member is None:
            return "the broker has not yet said which member the token belongs to"
        if self._connection is not None and (unreachable := trouble_of(self._connection)) is not None:
            return unreachable
        return None if self._consumer is None else self._consumer.trouble

    async def run(self) -> None:
        """Receive until `stop`; never raises."""
        failures = 0
        while not self._stopping:
            try:
                async with await Inbox.open(self._state_directory) as inbox:
                    self.inbox, self._trouble = inbox, None
                    try:
                        await self._receive(inbox)
                    finally:
                        self.inbox = None
                failures = 0
            except Exception as error:  # noqa: BLE001 - no error of the inbox may end sending
                self._trouble = str(error) or type(error).__name__
                failures += 1
                pause = _PAUSES.seconds(failures)
                _log.error("inbox_closed", reason=self._trouble, next_try_seconds=round(pause, 3))
                await asyncio.sleep(pause)
        await asyncio.Event().wait()  # a task that ends would end the process before the others have stopped

    async def stop(self, grace_seconds: float) -> None:
        """Take nothing more, and finish what is in hand within `grace_seconds`; safe to repeat."""
        self._stopping = True
        pulling = self._pulling if self._consumer is not None else None
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._stop_consumer(grace_seconds)
                if pulling is not None:
                    await asyncio.wait({pulling})  # once its connection is closed it may be cancelled

    async def _stop_consumer(self, grace_seconds: float) -> None:
        if self._handler is not None:
            self._handler.stop()
        if self._consumer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._consumer.stop()

    async def _receive(self, inbox: Inbox) -> None:
        """Pull, refill and prune until the consumer is stopped, or anything fails."""
        pulling = self._pulling = asyncio.create_task(self._pull(inbox), name="inbox pull")
        others = [self._refill(inbox), self._prune(inbox), self._watch(inbox)]
        tasks = {pulling, *(asyncio.create_task(other) for other in others)}
        try:
            running = tasks
            while not pulling.done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await end(tasks)

    async def _pull(self, inbox: Inbox) -> None:
        member = self._member = await self._token_member()
        self._handler = InboxHandler(inbox, self._mesh, self.counters)
        self._connection = NatsClient()
        await connect(self._nats, name=f"postroomd {self._mesh} {member}", client=self._connection)
        try:
            js = self._connection.jetstream()
            self._consumer = FileConsumer(js, inbox, self._handler, mesh=self._mesh, member=member)
            try:
                await self._consumer.run()
            finally:  # also where another part of the inbox failed: what is in hand goes back to the stream
                await self._stop_consumer(_CLOSE_SECONDS)
        finally:
            self._consumer = None
            await self._connection.close()

    async def _refill(self, inbox: Inbox) -> None:
        while await inbox.refill_due.wait():
            member = await self._token_member()
            oldest = from_milliseconds(await self._oldest_kept())
            try:
                token = TokenFile(self._broker.token_file).read()
                async with BrokerClient(self._broker.url, token, ca_file=self._broker.ca_file) as broker:
                    await refill(inbox, broker, member, oldest)
            except (PostroomError, OSError) as error:
                _log.warning("inbox_refill_waits", reason=str(error))
                await asyncio.sleep(_LOOK_SECONDS)

    async def _prune(self, inbox: Inbox) -> None:
        while True:
            try:
                await inbox.prune(await self._oldest_kept())
            except PostroomError as error:
                _log.warning("inbox_not_pruned", reason=str(error))
            await asyncio.sleep(_PRUNE_SECONDS)

    async def _oldest_kept(self) -> int:
        """Return the moment (ms since the epoch) before which nothing is kept, once the clock can be trusted.

        What is deleted by a clock that is ahead does not come back: the inbox knows it, and the refill leaves it out.
        """
        return await self._confirmed_time() - int(self._settings.retention_days * _DAY_MS)

    async def _watch(self, inbox: Inbox) -> None:
        """Raise once the file has failed, or the token belongs to another member."""
        while not inbox.failed.is_set():
            await within(in_step(_LOOK_SECONDS), inbox.failed)
            if self._member is not None and self._member != await self._token_member():
                raise unavailable("the broker's token now belongs to another member")
        raise Broken("the inbox file failed: it is opened again, and set aside if it is damaged")

    async def _token_member(self) -> str:
        """Wait until it is known which member of the mesh owns the token."""
        while True:
            features = self._features()
            if features is not None and features.mesh == self._mesh:
                return features.member
            await asyncio.sleep(_LOOK_SECONDS / 5)


class FileConsumer(Consumer):
    """The durable consumer of one inbox file, which begins where the file holds all that it has acknowledged."""

    def __init__(self, js: JetStreamContext, inbox: Inbox, filing: Handler, *, mesh: str, member: str) -> None:
        super().__init__(js, consumer_settings(mesh, member, inbox.id), filing, StreamLetters(js, mesh))
        self._js = js
        self._inbox = inbox

    async def made(self) -> None:
        """Raise `Broken` for a file that is older: it is opened again with a new consumer, and this one is deleted.

        The consumer notes in its metadata for which opening of the file it runs.
        """
        stream = self._settings.stream
        info = await self._js.consumer_info(stream, self.durable)
        said = info.config.metadata or {}
        delivered, acknowledged = (
            0 if number is None else number.consumer_seq for number in (info.delivered, info.ack_floor)
        )
        found = Durable(self.durable, str(info.created), delivered, acknowledged, said.get(_OPENING))
        if await self._inbox.holds(found):
            said = {**said, _OPENING: self._inbox.opening}
            await self._js.add_consumer(stream, info.config.evolve(metadata=said))
            return
        _log.error("inbox_older", consumer=self.durable, advice="it is refilled from NATS and the broker")
        with suppress(NotFoundError, *NATS_ERRORS):  # where it stays, `postroom consumer delete` takes it
            await self._js.delete_consumer(stream, self.durable)
        raise Broken("the inbox file is older than what was received: it is opened again, and refilled")

    async def skipped(self, delivery: Delivery) -> None:
        """Note its number; where that fails, as on a full disk, the file may be refilled without need."""
        with suppress(PostroomError):
            await self._inbox.file([], delivery.consumer_sequence)


def consumer_settings(mesh: str, member: str, file_id: str) -> ConsumerSettings:
    """Describe the durable consumer of one inbox file."""
    return ConsumerSettings(
        stream=stream_name(mesh, "inbox"),
        durable=f"{member[:_MEMBER_CHARACTERS]}__{file_id}",
        filter_subjects=[inbox_subject(mesh, member)],
        ack_wait_seconds=_ACK_WAIT,
        batch=_BATCH,
    )


class FilingCounters(msgspec.Struct):
    """Messages since the process started by their outcome, for metrics."""

    filed: int = 0
    known: int = 0  # had been filed before
    refused: int = 0  # were malformed


class InboxHandler:
    """Files batches: one transaction each, and `Done` only after its commit (docs/contract/delivery.md#delivery-80).

    A message that was filed before is recognised by its key in the file, so a batch that is redelivered is harmless.
    While the disk is full a batch waits in hand, for any time: a message never becomes a dead letter for that.
    """

    def __init__(
        self,
        inbox: Inbox,
        mesh: str,
        counters: FilingCounters,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._inbox = inbox
        self._mesh = mesh
        self._counters = counters
        self._sleep = sleep
        self._stopping = False
        self.trouble: str | None = None  # what keeps a batch waiting

    def stop(self) -> None:
        """Return a batch that waits to the stream."""
        self._stopping = True

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """File the messages of `batch` and settle them; malformed ones become dead letters."""
        messages, began = {}, time.time_ns()
        for delivery in batch:
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                message = _decode(delivery.data)
                if message.mesh == self._mesh and message.history_id > 0:
                    messages[delivery.sequence] = message
        delivered = max(delivery.consumer_sequence for delivery in batch)
        try:
            filed = await self._file(list(messages.values()), delivered)
        except (ArithmeticError, ValueError, RecursionError):  # a number, a text or a depth that SQLite cannot store
            if len(batch) > 1:
                raise  # then each is handled alone
            filed, messages = await self._file([], delivered), {}
        for delivery in batch if filed else ():
            if delivery.sequence not in messages:
                self._counters.refused += 1
                sentence = f"the message {delivery.message_id} is not a message of the mesh {self._mesh}"
                await settle(delivery, Dead("malformed", sentence))
                continue
            if spans.wanted():
                trace = messages[delivery.sequence].traceparent
                spans.record(spans.FILE, delivery.subject, delivery.message_id, trace, began=began)
            await settle(delivery, DONE)

    async def _file(self, messages: Sequence[HistoryMessage], delivered: int) -> bool:
        """Return whether the messages are on disk, and the number of the last delivery; waits while they cannot be."""
        while not self._stopping:
            try:
                new = await self._inbox.file(messages, delivered)
            except PostroomError as error:
                sentence = str(error)
                if sentence != self.trouble:
                    _log.warning("inbox_waits", reason=sentence)
                self.trouble = sentence
                await self._sleep(_RETRY_SECONDS)
                continue
            self._counters.filed += new
            self._counters.known += len(messages) - new
            self.trouble = None
            return True
        return False


async def refill(inbox: Inbox, broker: BrokerClient, member: str, accepted_after: datetime) -> None:
    """File what the broker's history has for `member`, from where an earlier refill stopped, up to its end.

    Messages to queues and to other members are left out. Raises `PostroomError`; the next call continues from there.
    """
    while True:
        query = HistoryQuery(after=inbox.refill_after or 0, limit=_PAGE)
        batch: list[HistoryMessage] = []
        try:
            async for message in broker.history(query):
                batch.append(message)
                if len(batch) == _PAGE:
                    await _refill(inbox, batch, member, accepted_after)
                    batch = []
            break
        except Gone as error:  # the broker's database was restored: what is filed already is known by its key
            _log.warning("inbox_refill_goes_back", reason=str(error))
            await inbox.refilled_to(error.problem.resume_after or 0)
    await _refill(inbox, batch, member, accepted_after)
    await inbox.refilled_to(None)
    _log.info("inbox_refilled")


async def _refill(inbox: Inbox, batch: Sequence[HistoryMessage], member: str, accepted_after: datetime) -> None:
    wanted = [
        each
        for each in batch
        if (each.destination_kind == "topic" or each.to == f"dm:{member}") and each.accepted_at >= accepted_after
    ]
    if wanted:
        await inbox.file(wanted)
    if batch:
        await inbox.refilled_to(batch[-1].history_id)
