"""Consumers that start and end while a program runs: it checks every few seconds which of them should run.

They have a connection to NATS of their own. A subclass's `look` begins those that are missing and ends those that
should no longer run; here they are kept, watched, counted, and stopped.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import astuple
from typing import Final, Generic, TypeVar

import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import POSTGRES_ERRORS
from postroom.chassis.runtime import end, within
from postroom.delivery.consumer import Consumer, ConsumerCounters
from postroom.delivery.errors import NATS_ERRORS, why_passing
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.errors import Conflict, PostroomError

_log = structlog.get_logger(__name__)

_PASSING: Final = (PostroomError, *POSTGRES_ERRORS, *NATS_ERRORS)  # the next look may succeed


Key = TypeVar("Key", bound=Hashable)
Kept = TypeVar("Kept", bound=Consumer)


class Consumers(ABC, Generic[Key, Kept]):
    """The consumers of one program by key: `run` as a task, `begin` and `end` from within a look."""

    def __init__(self, nats: NatsSettings, *, name: str, check_seconds: float) -> None:
        """`name` is what NATS and the logs know the program by; `check_seconds` lie between two looks."""
        self.running: dict[Key, Kept] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._ended = ConsumerCounters()  # of those that have ended
        self._unseen: str | None = None  # why the last look failed
        self._refused: dict[Key, str] = {}  # why some cannot run
        self._nats = nats
        self._name = name
        self._check_seconds = check_seconds
        self._stop = asyncio.Event()
        self._stopped = asyncio.Event()

    @abstractmethod
    async def look(self, js: JetStreamContext) -> None:
        """Begin the consumers that are missing, and end those that should no longer run."""

    async def run(self) -> None:
        """Look until `stop`; an outage of NATS or Postgres ends one look only. Raises what a consumer ended with."""
        connecting = asyncio.create_task(connect(self._nats, name=self._name))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                await self._keep_looking(connecting.result())
        finally:
            await end({connecting, stopping})
            self._stopped.set()

    async def stop(self) -> None:
        """Begin no more consumers, and wait for what is under way."""
        self._stop.set()
        await self._stopped.wait()

    def begin(self, key: Key, consumer: Kept) -> None:
        """Run a consumer from now on."""
        self.running[key] = consumer
        self._tasks[key] = asyncio.create_task(consumer.run())

    async def end(self, key: Key) -> Kept:
        """Stop a consumer, and return it when it has finished."""
        ending, task = self.running[key], self._tasks[key]
        await ending.stop()
        await asyncio.wait({task})
        del self.running[key], self._tasks[key]
        self._refused.pop(key, None)
        self._ended = _sum(self._ended, ending.counters)
        return ending

    @property
    def counters(self) -> ConsumerCounters:
        """What all of them have done since the start."""
        return _sum(self._ended, *(consumer.counters for consumer in self.running.values()))

    @property
    def trouble(self) -> str | None:
        """Why some consumer gets nothing, or why it is unknown which should run; None where all is well."""
        troubles = list(self._refused.values())
        troubles += [consumer.trouble for consumer in self.running.values() if consumer.trouble is not None]
        if self._unseen is not None or not troubles:
            return self._unseen
        return troubles[0] if len(troubles) == 1 else f"{troubles[0]} (and {len(troubles) - 1} more)"

    async def _keep_looking(self, connection: Client) -> None:
        try:
            while not self._stop.is_set():
                self._collect_what_ended()
                try:
                    await self.look(connection.jetstream())
                    self._unseen = None
                except _PASSING as error:
                    self._unseen = why_passing(error, "looking for what to consume")
                    _log.warning("consumers_not_checked", of=self._name, error=self._unseen)
                await within(self._check_seconds, self._stop)
        finally:
            await asyncio.gather(*(self.end(key) for key in list(self.running)))
            await connection.close()

    def _collect_what_ended(self) -> None:
        """Drop consumers that were refused with a `Conflict`; any other error is raised, and ends the program."""
        for key, task in list(self._tasks.items()):
            if not task.done():
                self._refused.pop(key, None)
                continue
            try:
                task.result()
            except Conflict as error:  # the others go on, and the next look begins this one again
                if self._refused.get(key) != str(error):
                    _log.error("consumer_refused", of=self._name, detail=str(error))
                self._refused[key] = str(error)
                self._ended = _sum(self._ended, self.running.pop(key).counters)
                del self._tasks[key]


async def run_alone(consumer: Consumer) -> None:
    """Run the only consumer of a program; raises `Fatal` where it cannot go on."""
    try:
        await consumer.run()
    except PostroomError as error:
        raise Fatal(Exit.TRY_AGAIN if error.retryable else Exit.CONFIG, str(error)) from error


def _sum(*counters: ConsumerCounters) -> ConsumerCounters:
    return ConsumerCounters(*(sum(column) for column in zip(*map(astuple, counters), strict=True)))
