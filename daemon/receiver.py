"""The receiving half of the daemon: opens the inbox, fills it from JetStream, and starts over where anything fails.

Whatever goes wrong here stays here: sending never notices. A file that breaks is closed and opened anew, which sets a
damaged one aside; then the durable consumer is a new one too, since its name holds the file's id: it acks what lies in
this file, and in no other. So each daemon of a member has a consumer of its own, and gets its own copy of everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import structlog
from nats.aio.client import Client

from broker_client.settings import BrokerClientSettings
from daemon.filing import Filing, FilingCounters, refill
from inbox import Broken, Inbox, InboxSettings, now_ms
from inbox.errors import unavailable
from postroom.accept import Features
from postroom.broker import BrokerClient
from postroom.delivery.consuming import Consumer
from postroom.delivery.dead_letters import StreamLetters
from postroom.delivery.nats import connect
from postroom.delivery.settings import ConsumerSettings, NatsSettings
from postroom.delivery.subjects import inbox_subject, stream_name
from postroom.errors import PostroomError
from postroom.retry import STEADY, Backoff

_log = structlog.get_logger(__name__)

_DAY_MS: Final = 86_400_000
_PRUNE_SECONDS: Final = 3600.0
_LOOK_SECONDS: Final = 1.0  # between two looks at whom the token speaks for
_PAUSES: Final = Backoff(0.5, 60.0, least=STEADY)  # before the inbox is opened anew
_ACK_WAIT: Final = 5.0  # seconds: what a killed daemon had in hand comes again soon
_UNLIMITED: Final = 1_000_000_000  # deliveries: what waits for space on the disk is never buried
_BATCH: Final = 200  # messages that share a transaction
_CLOSE_SECONDS: Final = 5.0  # longest wait for the batches in hand where the inbox has failed
_MEMBER_CHARACTERS: Final = 32  # of a durable's name, which has 64 at most


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
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`features` says for whom the broker says that the token speaks, None while that is not known."""
        self._nats = nats
        self._broker = broker
        self._settings = settings
        self._mesh = mesh
        self._state_directory = state_directory
        self._features = features
        self._sleep = sleep
        self.counters = FilingCounters()
        self.inbox: Inbox | None = None
        self._connection: Client | None = None
        self._consumer: Consumer | None = None
        self._filing: Filing | None = None
        self._member: str | None = None  # whose messages are being pulled
        self._trouble: str | None = "it is being opened"
        self._stopping = False

    def opened(self) -> Inbox:
        """Return the inbox; raises `TryAgain` (503) while it is not open."""
        if self.inbox is None:
            raise unavailable(self._trouble or "it is being opened")
        return self.inbox

    def trouble(self) -> str | None:
        """Say what keeps messages from arriving, None where nothing does."""
        if self._trouble is not None:
            return self._trouble
        if self._filing is not None and self._filing.trouble is not None:
            return self._filing.trouble
        if self._member is None:
            return "the broker has not said yet for whom the token speaks"
        if self._connection is None or not self._connection.is_connected:
            return "NATS cannot be reached"
        return None if self._consumer is None else self._consumer.trouble

    async def run(self) -> None:
        """Receive until `stop`; never raises."""
        failures = 0
        while not self._stopping:
            try:
                await self._open_and_receive()
                failures = 0
            except Exception as error:  # noqa: BLE001 - whatever it is, sending goes on
                self._trouble = str(error) or type(error).__name__
                failures += 1
                pause = _PAUSES.seconds(failures)
                _log.error("inbox_closed", reason=self._trouble, next_try_seconds=round(pause, 3))
                await self._sleep(pause)
        await asyncio.Event().wait()  # the process ends when a task does: the rest may take its time

    async def stop(self, grace_seconds: float) -> None:
        """Take nothing more, and finish what is in hand, for at most `grace_seconds`; safe to repeat."""
        self._stopping = True
        await self._stop_consumer(grace_seconds)

    async def _stop_consumer(self, grace_seconds: float) -> None:
        if self._filing is not None:
            self._filing.stop()
        if self._consumer is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._consumer.stop()

    async def _open_and_receive(self) -> None:
        async with await Inbox.open(self._state_directory) as inbox:
            self.inbox, self._trouble = inbox, None
            try:
                await self._receive(inbox)
            finally:
                self.inbox = None

    async def _receive(self, inbox: Inbox) -> None:
        """Pull, refill and prune until the consumer is stopped, or anything fails."""
        pulling = asyncio.create_task(self._pull(inbox), name="inbox pull")
        others = [self._refill(inbox), self._prune(inbox), self._watch(inbox)]
        tasks = {pulling, *(asyncio.create_task(other) for other in others)}
        try:
            running = tasks
            while not pulling.done():
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self, inbox: Inbox) -> None:
        member = self._member = await self._whom()
        self._filing = Filing(inbox, self._mesh, self.counters, sleep=self._sleep)
        self._connection = await connect(self._nats, name=f"postroomd {self._mesh} {member}")
        try:
            js = self._connection.jetstream()
            settings = consumer_settings(self._mesh, member, inbox.id)
            self._consumer = Consumer(js, settings, self._filing, StreamLetters(js, self._mesh))
            try:
                await self._consumer.run()
            finally:  # also where another part of the inbox failed: what is in hand goes back to the stream
                await self._stop_consumer(_CLOSE_SECONDS)
        finally:
            self._consumer = None
            await self._connection.close()

    async def _refill(self, inbox: Inbox) -> None:
        while inbox.refill_after is not None:
            member = await self._whom()
            oldest = datetime.now(UTC) - timedelta(days=self._settings.retention_days)
            try:
                token = self._broker.token_file.read_text("ascii").strip()
                async with BrokerClient(self._broker.url, token, ca_file=self._broker.ca_file) as broker:
                    await refill(inbox, broker, member, oldest)
            except (PostroomError, OSError) as error:
                _log.warning("inbox_refill_waits", reason=str(error))
                await self._sleep(_LOOK_SECONDS)

    async def _prune(self, inbox: Inbox) -> None:
        while True:
            try:
                await inbox.prune(now_ms() - int(self._settings.retention_days * _DAY_MS))
            except PostroomError as error:
                _log.warning("inbox_not_pruned", reason=str(error))
            await self._sleep(_PRUNE_SECONDS)

    async def _watch(self, inbox: Inbox) -> None:
        """Raise once the file has failed, or the token speaks for somebody else."""
        while not inbox.failed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await inbox.failed.wait()
            if self._member is not None and self._member != await self._whom():
                raise unavailable("the broker's token now speaks for another member")
        raise Broken("the inbox file failed: it is opened anew, and set aside where it is damaged")

    async def _whom(self) -> str:
        """Wait until it is known for which member of the mesh the token speaks."""
        while (features := self._features()) is None or features.mesh != self._mesh:
            await self._sleep(_LOOK_SECONDS / 5)
        return features.member


def consumer_settings(mesh: str, member: str, file_id: str) -> ConsumerSettings:
    """Describe the durable consumer of one inbox file."""
    return ConsumerSettings(
        stream=stream_name(mesh, "inbox"),
        durable=f"{member[:_MEMBER_CHARACTERS]}__{file_id}",
        filter_subjects=[inbox_subject(mesh, member)],
        ack_wait_seconds=_ACK_WAIT,
        max_deliver=_UNLIMITED,
        batch=_BATCH,
    )
