"""The consumer core: one durable pull consumer that gives messages to a handler and settles what the handler says.

Every kind of handler (HTTP, webhook, agent, job, inbox) runs on it. It knows three outcomes and counts nothing: the
handler decides whether a message is tried again, when, and which attempt is the last, by a record that survives both.
It promises, whatever crashes or disappears:

- a message is acknowledged only after its handler said `Done`, or after its dead letter is kept;
- a message in hand is kept from being delivered elsewhere by in-progress acks, however long its handler takes, and one
  that comes again meanwhile is not handled twice at once here;
- a `Later` comes back after its delay, and never blocks the others.

A message may be delivered again after its effect (a lost ack, a crash): handlers make that harmless by the message id
(docs/contract/delivery.md#delivery-28).
"""

import asyncio
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from random import Random
from typing import Final, NamedTuple, Protocol

import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from postroom._wire import spans
from postroom._wire.programs import LATENCIES
from postroom._wire.retry import Backoff, error_text
from postroom.chassis.routes import Histogram
from postroom.claims import DONE, Dead, Done, Later, Outcome
from postroom.delivery.dead_letters import REPLAY_OF, REPLAYED_FOR, DeadLetters, is_dead_letter, letter_of
from postroom.delivery.message import Delivery, delivery_of
from postroom.delivery.pull import Pull
from postroom.delivery.settings import ConsumerSettings, StreamSettings

_log = structlog.get_logger(__name__)

UNREADABLE: Final = "unreadable"
MAX_DELIVER: Final = "max_deliver"
ACK_TIMEOUT: Final = "ack_timeout"

_ACK: Final = b"+ACK"
_NAK: Final = b"-NAK"
_IN_PROGRESS: Final = b"+WPI"
_NANOSECONDS: Final = 1_000_000_000


class Attempts(NamedTuple):
    """How often a message may be attempted, and how long it waits in between, unless its sender set a retry policy."""

    most: int
    backoff: Backoff

    def failed(self, delivery: Delivery, attempt: int, error: str, after: float | None = None) -> Later | Dead:
        """Return what follows the failure of attempt number `attempt`, 1 or more.

        The message comes again `after` seconds where that is known, else by the schedule; after the last attempt it is
        dead.
        """
        if attempt >= delivery.most_attempts(self.most):
            return Dead(MAX_DELIVER, error, attempt)
        backoff = self.backoff if delivery.retry_policy is None else delivery.retry_policy.backoff
        return Later(error, backoff.seconds(attempt) if after is None else after)


class Settle(Protocol):
    """Settles one delivery; a second call, or one for a consumer that was deleted, does nothing."""

    async def __call__(self, delivery: Delivery, outcome: Outcome) -> None:
        """Report to JetStream, or to the dead letters, what became of `delivery`."""


class Handler(Protocol):
    """What is done with messages."""

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """Settle each delivery of `batch`, in any order; a delivery that stays unsettled comes again."""


def processing(delivery: Delivery, consumer: str, attempt: int) -> spans.Span:
    """Begin the span of an attempt to handle a message; that of a replay has a link to the trace of the first."""
    return spans.processing(
        spans.PROCESS,
        delivery.subject,
        delivery.message_id,
        delivery.headers.get("traceparent"),
        again=REPLAY_OF in delivery.headers,
        attributes={"messaging.consumer.group.name": consumer, "postroom.attempt": attempt},
    )


@dataclass(slots=True)
class ConsumerCounters:
    """What a consumer has done since it started, for metrics."""

    delivered: int = 0
    redelivered: int = 0
    done: int = 0
    retried: int = 0
    dead_lettered: int = 0


@dataclass(slots=True, eq=False)
class _Held:
    """A delivery in hand: where its ack goes, and when the server last heard of it (the loop's clock)."""

    delivery: Delivery
    reply: str
    epoch: datetime
    touched: float
    settled: bool = False


class Consumer:
    """One durable pull consumer: `run` it as a task, `stop` it before the connection is closed."""

    def __init__(
        self,
        js: JetStreamContext,
        settings: ConsumerSettings,
        handler: Handler,
        dead_letters: DeadLetters,
        *,
        stream: StreamSettings | None = None,
        took: Histogram | None = None,
        rng: Random | None = None,
    ) -> None:
        """`stream` lets the consumer declare its stream where that was deleted; without it, another program has to.

        `took` may be shared by consumers.
        """
        self.counters = ConsumerCounters()
        self._settings = settings
        self._handler = handler
        self._dead_letters = dead_letters
        self.took = took or Histogram(LATENCIES)  # seconds from each message's `occurred_at` until it was done
        self._rng = rng or Random()  # noqa: S311 - it spreads retries, no secret depends on it
        self._pull = Pull(
            js,
            settings,
            stream,
            room=self._room,
            paused=lambda: self.room is not None,
            receive=self._receive,
            made=self.made,
        )
        self._held: dict[int, _Held] = {}  # by sequence, all of one epoch
        self._epoch: datetime | None = None
        self._queue: deque[_Held] = deque()
        self._handling: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._dispatch_due = False

    async def declare(self) -> None:
        """Create the durable consumer, or change it to its settings, as `run` does when it begins.

        Raises `Conflict` with the difference where it may not be changed, `NotFound` without a stream, `Unavailable`.
        """
        await self._pull.declare()

    async def run(self) -> None:
        """Consume until stopped; raises `Unavailable` where the connection was closed permanently, or `Conflict`."""
        reminder = asyncio.create_task(self._remind())
        try:
            await self._pull.run()
            await self._finish()
        finally:
            reminder.cancel()
            for task in self._handling:
                task.cancel()

    async def stop(self) -> None:
        """Take no more messages, hand back at once those that no handler has seen, and finish the others."""
        self._stopping = True
        await self._pull.stop()
        while self._queue:
            held = self._queue.popleft()
            await self._answer(held, _NAK)
        await self._finish()

    async def made(self) -> None:
        """Raise `NotFound` where the durable consumer, just created, should not exist; by default it always should."""

    async def skipped(self, delivery: Delivery) -> None:
        """Note a message that is settled without a handler, before it is; by default there is nothing to note."""

    @property
    def room(self) -> int | None:
        """How many messages the handler can take now; None sets no limit, 0 pauses the consumer."""
        return None

    @property
    def stream(self) -> str:
        """The name of the stream that it reads."""
        return self._settings.stream

    @property
    def durable(self) -> str:
        """Its name in JetStream."""
        return self._settings.durable

    @property
    def trouble(self) -> str | None:
        """What keeps messages from arriving, or from being handled; None where nothing does."""
        return self._pull.trouble

    @property
    def in_hand(self) -> int:
        """How many messages are waiting for a handler here, or being handled."""
        return len(self._held)

    async def _finish(self) -> None:
        while self._handling:
            await asyncio.wait(self._handling)

    def _room(self) -> int:
        most, wanted = self._settings.max_ack_pending, self.room
        return (most if wanted is None else min(most, wanted)) - len(self._held)

    def _receive(self, message: Msg, epoch: datetime) -> None:
        """Take a message in hand; of one that is in hand already only the new ack subject is noted."""
        delivery = delivery_of(message)
        self.counters.delivered += 1
        self.counters.redelivered += delivery.attempt > 1
        if epoch != self._epoch:
            self._held.clear()  # of a consumer that was deleted: no ack for them counts any more
            self._queue.clear()
            self._epoch = epoch
        now = asyncio.get_running_loop().time()
        held = self._held.get(delivery.sequence)
        if held is not None:
            held.reply, held.touched = message.reply, now
            return
        held = self._held[delivery.sequence] = _Held(delivery, message.reply, epoch, now)
        self._queue.append(held)
        if not self._dispatch_due:  # once for all that arrive in this turn of the loop
            self._dispatch_due = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        """Give what is queued to the handler, up to its `batches_at_once`."""
        self._dispatch_due = False
        while self._queue and not self._stopping and len(self._handling) < self._settings.batches_at_once:
            count = min(len(self._queue), self._settings.batch)
            batch = [self._queue.popleft() for _ in range(count)]
            self._handling.add(task := asyncio.create_task(self._handle(batch)))
            task.add_done_callback(self._handled)

    def _handled(self, task: asyncio.Task[None]) -> None:
        self._handling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("batch_failed", consumer=self._settings.durable, exc_info=error)
        self._dispatch()

    async def _handle(self, batch: list[_Held]) -> None:
        """Give a batch to the handler, without replays for another consumer and without unreadable messages."""
        chosen = []
        for held in batch:
            delivery = held.delivery
            outcome: Outcome = DONE
            if delivery.headers.get(REPLAYED_FOR, self._settings.durable) == self._settings.durable:
                if (why := delivery.unreadable) is None:
                    chosen.append(held)
                    continue
                outcome = Dead(UNREADABLE, why)
            await self.skipped(delivery)
            await self._settle_held(held, outcome)
        await self._give(chosen)

    async def _give(self, chosen: list[_Held]) -> None:
        """Have `chosen` handled; where that raises, each alone, so that one bad message does not fail the others."""
        error = "the handler returned no outcome for this message"
        try:
            if chosen:
                await self._handler.handle([held.delivery for held in chosen], self._settle)
        except Exception as raised:  # noqa: BLE001 - what a handler raises on comes again
            error = error_text(raised)
            _log.exception("handler_raised", consumer=self._settings.durable, messages=len(chosen))
            if len(chosen) > 1:
                for held in chosen:
                    if not held.settled:
                        await self._give([held])
        for held in chosen:
            if not held.settled:
                await self._settle_held(held, Later(error, self._pause(held)))

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        held = self._held.get(delivery.sequence)
        if held is not None and held.delivery is delivery and not held.settled:
            await self._settle_held(held, outcome)

    async def _settle_held(self, held: _Held, outcome: Outcome) -> None:
        held.settled = True
        match outcome:
            case Done():
                if await self._answer(held, _ACK):
                    self.counters.done += 1
                    self.took.observe((datetime.now(UTC) - held.delivery.occurred_at).total_seconds())
            case Later(error, seconds):
                _log.info("message_retried", **self._named(held), error=error)
                await self._later(held, seconds)
            case Dead():
                await self._bury(held, outcome)

    async def _bury(self, held: _Held, outcome: Dead) -> None:
        """Keep the dead letter and only then ack; where it cannot be kept, the message comes again.

        A dead letter that cannot be handled gets no letter of its own: that letter would come here again, and again.
        """
        delivery = held.delivery if outcome.attempts is None else held.delivery._replace(attempt=outcome.attempts)
        if is_dead_letter(delivery):
            _log.warning("dead_letter_not_handled", **self._named(held), reason=outcome.reason, error=outcome.error)
            await self._answer(held, _ACK)
            return
        try:
            await self._dead_letters.keep(
                letter_of(delivery, reason=outcome.reason, error=outcome.error, consumer=self._settings.durable)
            )
        except Exception as error:  # noqa: BLE001 - a letter that cannot be kept holds up its own message only
            _log.error("dead_letter_refused", **self._named(held), reason=outcome.reason, detail=error_text(error))
            await self._later(held, self._pause(held))
            return
        _log.warning("message_dead_lettered", **self._named(held), reason=outcome.reason, error=outcome.error)
        if await self._answer(held, _ACK):
            self.counters.dead_lettered += 1

    async def _later(self, held: _Held, seconds: float) -> None:
        delay = json.dumps({"delay": int(max(seconds, 0.0) * _NANOSECONDS)}).encode()
        if await self._answer(held, _NAK + b" " + delay):
            self.counters.retried += 1

    def _pause(self, held: _Held) -> float:
        """Return how long a message waits for which no handler set a delay."""
        return self._settings.backoff.schedule.seconds(held.delivery.attempt, self._rng.random)

    async def _answer(self, held: _Held, text: bytes) -> bool:
        """Send the last ack for a message, and forget it; False where its consumer was deleted."""
        try:
            return await self._pull.answer(held.reply, text, held.epoch)
        finally:
            if self._held.get(held.delivery.sequence) is held:
                del self._held[held.delivery.sequence]
                self._pull.more()

    async def _remind(self) -> None:
        """Report what is still in hand three times per `ack_wait`, so that it is not delivered to another process."""
        interval = self._settings.ack_wait_seconds / 3
        while True:
            await asyncio.sleep(interval)
            now = asyncio.get_running_loop().time()
            for held in [held for held in self._held.values() if now - held.touched >= interval]:
                if self._pull.sure and self._held.get(held.delivery.sequence) is held:
                    held.touched = now
                    await self._pull.answer(held.reply, _IN_PROGRESS, held.epoch)

    def _named(self, held: _Held) -> dict[str, object]:
        delivery = held.delivery
        return {
            "consumer": self._settings.durable,
            "message_id": delivery.message_id,
            "subject": delivery.subject,
            "sequence": delivery.sequence,
            "attempt": delivery.attempt,
        }
