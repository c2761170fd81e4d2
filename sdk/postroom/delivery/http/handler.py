"""The inbox consumer with an HTTP handler (docs/contract/delivery.md#delivery-31).

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

Attempts are counted here, by the row, whatever the server has counted: a message is claimed when it is about
to be called, so a consumer that is killed uses up an attempt (`ack_timeout`) of those that it was calling, and of no
other that it had in hand. A call for which no connection came about is not an attempt: it is given back, and calls
pause until somebody can be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final

import structlog

from postroom.chassis.logs import clean
from postroom.chassis.postgres import REFUSED
from postroom.delivery.consuming import ACK_TIMEOUT, DONE, MAX_DELIVER, Attempts, Dead, Later, Outcome, Settle
from postroom.delivery.http.answers import Judgement, State, judge
from postroom.delivery.http.client import HandlerClient
from postroom.delivery.http.counters import HandlerCounters
from postroom.delivery.http.inbox_messages import Claim, Died, Held, InboxMessages, Processed
from postroom.delivery.http.leases import LeaseLost, Leases
from postroom.delivery.http.reach import Reach
from postroom.delivery.http.requests import Incoming, Malformed, body, headers, read
from postroom.delivery.message import Delivery

_log = structlog.get_logger(__name__)

LEASE_SHARE: Final = 2 / 3  # of ack_wait: the lease of a consumer that died is over when the message comes again
_STOPPED: Final = Later("the consumer stopped before it called the handler", 0)
_LEASE_RAN_OUT: Final = Later("the lease ran out before the attempt had ended", 0)


class HttpHandler:
    """A `delivery.consuming.Handler` that posts each message; `leases.run` goes beside it as a task."""

    def __init__(self, inbox: InboxMessages, client: HandlerClient, *, attempts: Attempts, calls_at_once: int) -> None:
        self.counters = HandlerCounters()
        self.leases = Leases(inbox)
        self.reach = Reach(client.name)
        self._inbox = inbox
        self._client = client
        self._attempts = attempts
        self._slots = asyncio.Semaphore(calls_at_once)
        self._stopping = False

    @property
    def room(self) -> int | None:
        """How many messages are of use now; None sets no limit. A handler that cannot be reached wants none."""
        return self.reach.room

    def stop(self) -> None:
        """Begin no further call: messages that wait for one are given back, those being called come to their end."""
        self._stopping = True

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """Settle each delivery as soon as it is decided."""
        ended = await asyncio.gather(*(self._handle(delivery, settle) for delivery in batch), return_exceptions=True)
        for error in ended:
            if error is not None:
                raise error

    async def _handle(self, delivery: Delivery, settle: Settle) -> None:
        try:
            incoming = read(delivery)
        except Malformed as error:
            self.counters.malformed += 1
            await settle(delivery, Dead(error.reason, str(error)))
        else:
            await settle(delivery, await self._tried(incoming))

    async def _tried(self, incoming: Incoming) -> Outcome:
        try:
            return await self._outcome(incoming)
        except REFUSED as error:
            self.counters.malformed += 1
            return Dead("refused_by_postgres", f"Postgres cannot store the message: {clean(str(error))}")

    async def _outcome(self, incoming: Incoming) -> Outcome:
        """Attempt the message when its turn has come, or learn that there is no need to."""
        async with AsyncExitStack() as turn:
            await turn.enter_async_context(self._slots)
            if self._stopping:
                return _STOPPED
            if (wait := turn.enter_context(self.reach.turn())) > 0:
                return Later(f"{self.reach.error}", wait)
            match await self._inbox.claim(incoming):
                case Claim() as claim:
                    return await self._attempt(incoming, claim, turn)
                case Processed():
                    self.counters.duplicates += 1
                    return DONE
                case Died(reason, error, attempts):
                    return Dead(reason, error, attempts)
                case Held(seconds):
                    self.counters.held += 1
                    return Later("another attempt is running", seconds)

    async def _attempt(self, incoming: Incoming, claim: Claim, turn: AsyncExitStack) -> Outcome:
        """Call the handler, end the turn, and write down what came of it, unless the lease ran out."""
        try:
            async with self.leases.holding(claim):
                judgement = await self._judgement(incoming, claim)
                await turn.aclose()  # what is written meanwhile holds up no call
                if await self._inbox.settle(claim, judgement):
                    return self._outcome_of(incoming.delivery, judgement, claim.attempt)
        except LeaseLost:
            pass
        self.counters.leases_lost += 1
        _log.warning("lease_lost", message_id=claim.message_id, attempt=claim.attempt)
        return _LEASE_RAN_OUT

    async def _judgement(self, incoming: Incoming, claim: Claim) -> Judgement:
        """Call the handler, unless all attempts are used up: the last one ended without a word then."""
        most = incoming.delivery.most_attempts(self._attempts.most)
        if claim.attempt > most:
            return Judgement(State.EXHAUSTED, MAX_DELIVER, claim.last_error or ACK_TIMEOUT)
        with self.counters.call():
            answer = await self._client.call(body(incoming), headers(incoming, claim.attempt, claim.last_error))
        self.counters.answers[answer.code or f"http_{answer.status}"] += 1
        if not answer.reached:
            return judge(answer, last=False)._replace(after=self.reach.missed(answer.error))
        self.reach.reached()
        return judge(answer, last=claim.attempt == most)

    def _outcome_of(self, delivery: Delivery, judgement: Judgement, attempt: int) -> Outcome:
        error = judgement.error or ""
        match judgement.state:
            case State.PROCESSED:
                return DONE
            case State.DEAD:
                return Dead(judgement.reason or "", error, attempt)
            case State.EXHAUSTED:
                return Dead(judgement.reason or "", error, attempt - 1)
            case State.UNREACHED:
                return Later(error, judgement.after or 0)
            case State.FAILED:
                return self._attempts.failed(delivery, attempt, error, judgement.after)
