"""The inbox consumer with an HTTP handler: CMD-051 and CMD-052 (spec delivery.md, "Inbox and HTTP handler").

    claim        the row in `inbox_messages` says whether this is an attempt, and leases it to us     (a statement)
    call         the handler is called, with the message id as its `Idempotency-Key`
    settle       what it answered is written, if the lease still holds                                (a statement)
    acknowledge  what is written is told to JetStream; a dead letter is published before that

Whatever crashes between two steps, the message is delivered again and the row says where it stands:

- before `settle` has committed, the handler is called again: at least once, with the same key each time;
- after it, the handler is never called again: only the acknowledgement, or the dead letter, is made up for.

So a handler that remembers the key (or answers 409) has each effect exactly once, and no two calls for one message are
made at once by any number of consumers. A call that timed out is given up on this side; whether the handler still runs
it, only the handler knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from delivery.consuming import DONE, MAX_DELIVER, Dead, Outcome, Retry, Settle
from delivery.http.answers import Judgement, State, judge
from delivery.http.client import HandlerClient
from delivery.http.counters import HandlerCounters
from delivery.http.inbox_messages import Claim, Died, Held, InboxMessages, Processed
from delivery.http.leases import LeaseLost, Leases
from delivery.http.requests import Incoming, Malformed, body, headers, read
from delivery.message import Delivery
from postroom.errors import TryAgain

_log = structlog.get_logger(__name__)

LEASE_SHARE: Final = 2 / 3  # of ack_wait: the lease of a consumer that died is over when the message comes again
_RELEASED: Final = Judgement(State.RELEASED)


class HttpHandler:
    """A `delivery.consuming.Handler` that posts each message; `leases.run` goes beside it as a task."""

    def __init__(self, inbox: InboxMessages, client: HandlerClient, *, max_deliver: int, calls_at_once: int) -> None:
        self.counters = HandlerCounters()
        self.leases = Leases(inbox)
        self._inbox = inbox
        self._client = client
        self._max_deliver = max_deliver
        self._slots = asyncio.Semaphore(calls_at_once)
        self._stopping = False

    def stop(self) -> None:
        """Begin no further call: messages that wait for one are given back, those being called come to their end."""
        self._stopping = True

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """Settle each delivery as soon as it is decided."""
        ended = await asyncio.gather(*(self._handle(delivery, settle) for delivery in batch), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def is_done(self, delivery: Delivery) -> bool:
        """Tell whether the message was processed, and if not, give it up: all its deliveries are used up.

        Raises `TryAgain` while another consumer attempts it.
        """
        try:
            incoming = read(delivery)
        except Malformed:
            return False
        match await self._inbox.close(incoming, MAX_DELIVER, "ack_timeout"):
            case Held():
                raise TryAgain.of(503, "attempt_under_way", f"{delivery.message_id} is being attempted", retryable=True)
            case state:
                return isinstance(state, Processed)

    async def _handle(self, delivery: Delivery, settle: Settle) -> None:
        try:
            incoming = read(delivery)
        except Malformed as error:
            self.counters.malformed += 1
            await settle(delivery, Dead(error.reason, str(error)))
        else:
            await settle(delivery, await self._outcome(incoming))

    async def _outcome(self, incoming: Incoming) -> Outcome:
        """Attempt the message, or learn that there is no need to; at the last delivery wait until either is possible.

        (A `Retry` would then bury a message of which nobody knows that it can't be handled.)
        """
        last = incoming.delivery.last
        while True:
            match await self._inbox.claim(incoming):
                case Claim() as claim:
                    judgement = await self._attempt(incoming, claim)
                    if judgement is not None:
                        return _outcome_of(judgement)
                    if not last:
                        return Retry("the lease ran out before the attempt had ended", after=0)
                case Processed():
                    self.counters.duplicates += 1
                    return DONE
                case Died(reason, error):
                    return Dead(reason, error)
                case Held(seconds):
                    self.counters.held += 1
                    if not last:
                        return Retry("another attempt is under way", after=seconds)
                    await asyncio.sleep(seconds)

    async def _attempt(self, incoming: Incoming, claim: Claim) -> Judgement | None:
        """Call the handler and write down what came of it; None where the lease ran out, so that nothing is written."""
        try:
            async with self.leases.holding(claim):
                judgement = await self._call(incoming, claim)
                if await self._inbox.settle(claim, judgement):
                    return judgement
        except LeaseLost:
            pass
        self.counters.leases_lost += 1
        _log.warning("lease_lost", message_id=claim.message_id, attempt=claim.attempt)
        return None

    async def _call(self, incoming: Incoming, claim: Claim) -> Judgement:
        delivery = incoming.delivery
        last = delivery.last or claim.attempt >= delivery.most_attempts(self._max_deliver)
        async with self._slots:
            if self._stopping and not last:
                return _RELEASED
            request = body(incoming)
            with self.counters.call():
                answer = await self._client.call(request, headers(incoming, claim.attempt, claim.last_error))
        self.counters.answers[answer.code or f"http_{answer.status}"] += 1
        return judge(answer, last=last)


def _outcome_of(judgement: Judgement) -> Outcome:
    match judgement.state:
        case State.PROCESSED:
            return DONE
        case State.DEAD:
            return Dead(judgement.reason or "", judgement.error or "")
        case State.FAILED:
            return Retry(judgement.error or "", after=judgement.after)
        case State.RELEASED:
            return Retry("the consumer stopped before it called the handler", after=0)
