"""The inbox consumer with an HTTP handler (docs/contract/delivery.md#delivery-31).

    claim        the row in `inbox_messages` says whether this is an attempt, and leases it to us     (a statement)
    call         the handler is called, with the message id as its `Idempotency-Key`
    settle       the outcome is written, if the lease still holds                                     (a statement)
    acknowledge  the outcome is reported to JetStream; a dead letter is kept before that

After a crash between two steps the message is delivered again, and the row says which step is next:

- before `settle` has committed, the handler is called again: at least once, with the same key each time;
- after it, the handler is never called again: only the acknowledgement, or the dead letter, is made up for.

So a handler that remembers the key (or answers 409) has each effect exactly once, and no two calls for one message are
made at once by any number of consumers. A call that timed out is given up on this side; only the handler knows whether
it still runs.

Attempts are counted here, by the row, and not by the server: a message is claimed when its handler is about to be
called, so a consumer that is killed uses up an attempt (`ack_timeout`) of those that it was calling, and of no other
that it had in hand. A call without a connection is not an attempt: it is given back, and calls pause until the handler
can be reached.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import datetime
from typing import Final

import structlog
from nats.js import JetStreamContext

from postroom._wire.retry import STEADY, Backoff
from postroom.chassis.logs import clean
from postroom.chassis.postgres import REFUSED, Pool
from postroom.chassis.routes import Histogram
from postroom.claims import DONE, Claim, Dead, Done, Held, Later, Outcome
from postroom.claims.leases import LeaseLost
from postroom.delivery.consumer import ACK_TIMEOUT, MAX_DELIVER, Attempts, Consumer, Settle, processing
from postroom.delivery.dead_letters import RecordedLetters
from postroom.delivery.http.client import HandlerClient, judge
from postroom.delivery.http.inbox_messages import InboxMessages, InboxRetention
from postroom.delivery.http.requests import Incoming, Malformed, posted, read
from postroom.delivery.message import Delivery
from postroom.delivery.settings import ConsumerSettings, InboxSettings, StreamSettings

_log = structlog.get_logger(__name__)

PAUSES: Final = Backoff(0.5, 30.0, least=STEADY)  # after calls without a connection
_CALL_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)  # seconds

LEASE_SHARE: Final = 2 / 3  # of ack_wait: the lease of a killed consumer has ended when the message comes again
_STOPPED: Final = Later("the consumer stopped before it called the handler", 0)
_LEASE_RAN_OUT: Final = Later("the lease ran out before the attempt had ended", 0)


class Reach:
    """What is known of one handler, from the calls to it."""

    def __init__(self, name: str) -> None:
        """`name` is the handler's name in the log."""
        self.error: str | None = None  # why it cannot be reached; None while it can, as far as is known
        self._name = name
        self._since = 0.0
        self._missed = 0  # calls in a row without a connection
        self._noted = 0.0  # when the last of them ended
        self._next = 0.0  # when a call may be tried
        self._trying = False

    @property
    def away_seconds(self) -> float:
        """For how long it has been unreachable; 0 while it can be reached."""
        return 0.0 if self.error is None else time.monotonic() - self._since

    @property
    def room(self) -> int | None:
        """How many messages are of use now: None sets no limit."""
        if self.error is None:
            return None
        return 0 if self._trying or time.monotonic() < self._next else 1

    @contextmanager
    def turn(self) -> Iterator[float]:
        """Yield 0 where a call may be made in the block, else the seconds until one may be tried."""
        if self.error is None:
            yield 0.0
        elif self.room:
            self._trying = True
            try:
                yield 0.0
            finally:
                self._trying = False
        else:
            yield max(self._next - time.monotonic(), PAUSES.first)

    def missed(self, error: str, began: float) -> float:
        """Take note of a call that found nobody, and when it began; return the seconds until the next may be tried."""
        if self.error is None or began > self._noted:  # what was under way together counts once
            self._noted = time.monotonic()
            self._since = self._noted if self.error is None else self._since
            self._missed = 1 if self.error is None else self._missed + 1
            pause = PAUSES.seconds(self._missed)
            self._next = self._noted + pause
            _log.warning("handler_unreachable", handler=self._name, error=error, pause_seconds=round(pause, 3))
        self.error = error
        return max(self._next - time.monotonic(), 0.0)

    def reached(self) -> None:
        """Note a call that reached the handler, whatever the answer."""
        if self.error is not None:
            _log.info("handler_reached", handler=self._name, away_seconds=round(self.away_seconds, 1))
        self.error = None


class HandlerCounters:
    """Counts since the process started."""

    def __init__(self) -> None:
        self.answers: Counter[str] = Counter()  # by `http_<status>`, or the code of a call without an answer
        self.calls_under_way = 0
        self.call_seconds = Histogram(_CALL_BOUNDS)
        self.duplicates = 0
        self.malformed = 0
        self.held = 0
        self.leases_lost = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count and time one call of the handler."""
        started = time.monotonic()
        self.calls_under_way += 1
        try:
            yield
        finally:
            self.calls_under_way -= 1
            self.call_seconds.observe(time.monotonic() - started)


class HttpHandler:
    """A `delivery.consumer.Handler` that posts each message."""

    def __init__(
        self,
        inbox: InboxMessages,
        client: HandlerClient,
        *,
        attempts: Attempts,
        calls_at_once: int,
        since: datetime | None = None,
    ) -> None:
        """Post what happened after `since`, whenever it was published; what is older counts as handled."""
        self.counters = HandlerCounters()
        self.reach = Reach(client.name)
        self._inbox = inbox
        self._client = client
        self._attempts = attempts
        self._since = since
        self._slots = asyncio.Semaphore(calls_at_once)
        self._stopping = False

    def stop(self) -> None:
        """Begin no further call: messages that wait for one are given back, running calls finish."""
        self._stopping = True

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """Settle each delivery as soon as it is decided."""
        ended = await asyncio.gather(*(self._handle(delivery, settle) for delivery in batch), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def _handle(self, delivery: Delivery, settle: Settle) -> None:
        if self._since is not None and delivery.occurred_at <= self._since:
            await settle(delivery, DONE)
            return
        try:
            outcome = await self._outcome(read(delivery))
        except Malformed as error:
            self.counters.malformed += 1
            outcome = Dead(error.reason, str(error))
        except REFUSED as error:
            self.counters.malformed += 1
            outcome = Dead("refused_by_postgres", f"Postgres cannot store the message: {clean(str(error))}")
        await settle(delivery, outcome)

    async def _outcome(self, incoming: Incoming) -> Outcome:
        """Attempt the message when its turn has come, unless it is handled already, or held."""
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._slots)
            if self._stopping:
                return _STOPPED
            if (wait := turn.enter_context(self.reach.turn())) > 0:
                return Later(f"{self.reach.error}", wait)
            match await self._inbox.claim(incoming):
                case Claim() as claim:
                    return await self._attempt(incoming, claim, turn)
                case Done():
                    self.counters.duplicates += 1
                    return DONE
                case Dead() as dead:
                    return dead
                case Held(_, seconds):
                    self.counters.held += 1
                    return Later("another attempt is running", seconds)

    async def _attempt(self, incoming: Incoming, claim: Claim, turn: AsyncExitStack) -> Outcome:
        """Call the handler, end the turn, and record the outcome, unless the lease ran out."""
        try:
            async with self._inbox.leases.holding(claim):
                outcome, counts = await self._called(incoming, claim)
                await turn.aclose()  # what is written meanwhile holds up no call
                if await self._inbox.settle(claim, outcome, counts=counts):
                    return outcome
        except LeaseLost:
            pass
        self.counters.leases_lost += 1
        _log.warning("lease_lost", message_id=incoming.message_id, attempt=claim.attempt)
        return _LEASE_RAN_OUT

    async def _called(self, incoming: Incoming, claim: Claim) -> tuple[Outcome, bool]:
        """Call the handler; return the outcome, and whether that was an attempt.

        There is no call where all attempts are used up: then the process of the last one was killed.
        """
        delivery = incoming.delivery
        if claim.attempt > delivery.most_attempts(self._attempts.most):
            return Dead(MAX_DELIVER, claim.last_error or ACK_TIMEOUT, claim.attempt - 1), False
        with processing(delivery, self._inbox.consumer, claim.attempt) as span:
            began = time.monotonic()
            with self.counters.call():
                made = posted(incoming, self._inbox.consumer, claim.attempt, claim.last_error, self._client.format)
                answer = await self._client.call(*made)
            code = answer.code or f"http_{answer.status}"
            self.counters.answers[code] += 1
            if not answer.reached:
                span.failed(code, answer.error)
                return Later(answer.error, self.reach.missed(answer.error, began)), False
            self.reach.reached()
            outcome = judge(answer, delivery, claim.attempt, self._attempts)
            if not isinstance(outcome, Done):
                span.failed(code, outcome.error)
            return outcome, True


class PostingConsumer(Consumer):
    """A durable consumer whose messages are posted, with the inbox of what it has handled; `run` it as a task."""

    def __init__(
        self,
        js: JetStreamContext,
        settings: ConsumerSettings,
        pool: Pool,
        client: HandlerClient,
        *,
        mesh: str,
        calls_at_once: int,
        keep: InboxSettings,
        since: datetime | None = None,
        stream: StreamSettings | None = None,
        took: Histogram | None = None,
    ) -> None:
        """Post what happened after `since`, if it is given, and `keep` what was handled; the rest as of `Consumer`."""
        self.inbox = InboxMessages(pool, settings.durable, lease_seconds=settings.ack_wait_seconds * LEASE_SHARE)
        attempts = Attempts(settings.max_deliver, settings.backoff.schedule)
        self.handler = HttpHandler(self.inbox, client, attempts=attempts, calls_at_once=calls_at_once, since=since)
        letters = RecordedLetters(pool, mesh)
        super().__init__(js, settings, self.handler, letters, stream=stream, took=took)
        self.retention = InboxRetention(pool, js, stream=settings.stream, durable=settings.durable, settings=keep)

    @property
    def room(self) -> int | None:
        """See `Consumer`; a handler that cannot be reached takes none."""
        return self.handler.reach.room

    async def stop(self) -> None:
        """Begin no further request, and wait for those under way."""
        self.handler.stop()
        await super().stop()
