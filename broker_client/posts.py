"""One post: a batch goes to the broker, its answers become settlements, and they are stored in one transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Final

import structlog

from broker_client.answers import (
    REACTIONS,
    Outcome,
    RelayCounters,
    Waits,
    backed_off,
    outcome_of,
    returned,
    settlement_for,
)
from broker_client.availability import Availability
from broker_client.channel import Failure, RequestFailed
from broker_client.link import BrokerLink
from broker_client.pace import Suspects
from broker_client.settings import RelaySettings
from outbox import Outbox
from outbox.model import ClaimedRow, Settlement, Verdict
from postroom._wire.accept import AcceptAnswer
from postroom._wire.retry import clamp_retry_after
from postroom.chassis.logs import clean
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

SUSPECTS_LATER: Final = 4  # by this part of a pause, so that the next probe takes other rows where there are any
OUTBOX_STOPPED: Final = frozenset({"outcome_unknown", "stopping"})  # codes of an outbox that takes nothing any more
STORAGE_SECONDS: Final = 1.0  # between two tries to store a settlement, when the disk is full


class Posting:
    """Posts batches and settles them; what it learns of the broker and of suspects it shares with the relay's loop."""

    def __init__(
        self,
        outbox: Outbox,
        link: BrokerLink,
        settings: RelaySettings,
        availability: Availability,
        *,
        clock: Callable[[], int],
        rng: Random,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._outbox = outbox
        self._link = link
        self._settings = settings
        self._availability = availability
        self._clock = clock
        self._waits = Waits(rng, settings)
        self._sleep = sleep
        self.suspects = Suspects()
        self.counters = RelayCounters()

    async def relay(self, batch: Sequence[ClaimedRow]) -> None:
        """Post `batch` and settle it; posting twice is harmless, since the broker keeps a dedupe row of what it has."""
        pauses, started = self._availability.pauses, self._clock()
        try:
            answers = await self._link.accept(batch)
            _look_behind_the_broker(answers)
        except RequestFailed as error:
            result, outcomes, settlements = error.failure.value, *self._failed(batch, error, pauses)
        else:
            result, outcomes, settlements = "answered", *self._answered(batch, answers, pauses)
        self.counters.batch(result, outcomes, (self._clock() - started) / 1000)
        await self.settle(settlements)

    async def settle(self, settlements: Sequence[Settlement]) -> None:
        """Store the settlements in one transaction; while the disk is full, try again until it is not.

        An outbox that has stopped takes nothing more: the rows stay `inflight`, and the next start puts them back.
        """
        while True:
            try:
                await self._outbox.settle(settlements)
            except PostroomError as error:
                if error.code in OUTBOX_STOPPED:
                    return
                if not error.retryable:
                    raise
                _log.warning("settlement_not_stored", code=error.code, rows=len(settlements))
                await self._sleep(STORAGE_SECONDS)
            else:
                return

    def _answered(
        self, batch: Sequence[ClaimedRow], answers: Sequence[AcceptAnswer], pauses: int
    ) -> tuple[list[Outcome], list[Settlement]]:
        now = self._clock()
        outcomes = [outcome_of(answer) for answer in answers]
        settlements = [settlement_for(row, answer, self._waits) for row, answer in zip(batch, answers, strict=True)]
        self.suspects.clear(batch)
        self._availability.succeeded(pauses, now)
        if len(batch) > 1 and all(outcome is Outcome.RATE_LIMITED for outcome in outcomes):
            asked = [answer.problem.retry_after or 0 for answer in answers if answer.problem is not None]
            self._availability.rest(
                min(clamp_retry_after(min(asked, default=0)), self._settings.backoff_most_seconds), now
            )
        for row, answer, settlement in zip(batch, answers, settlements, strict=True):
            if settlement.verdict is Verdict.DEAD:
                _log.warning("message_dead", client_message_id=row.client_message_id, last_error=settlement.last_error)
            elif answer.history_available is False:
                _log.warning("history_unavailable", client_message_id=row.client_message_id)
        return outcomes, settlements

    def _failed(
        self, batch: Sequence[ClaimedRow], error: RequestFailed, pauses: int
    ) -> tuple[list[Outcome], list[Settlement]]:
        now = self._clock()
        reason = f"{error.code}: {error.problem.detail}"
        _, suspicious, _, busy, untaken = REACTIONS[error.failure]
        answered = None if untaken else False
        to_blame = suspicious and self.suspects.failed(batch, self._availability.answered)
        if to_blame and len(batch) == 1:
            _log.warning("message_backed_off", client_message_id=batch[0].client_message_id, reason=reason)
            return [Outcome.FAILED], [backed_off(batch[0], reason, self._waits, answered=answered)]
        if not to_blame:
            self._availability.failed(error, pauses, now)
        wait = 0 if to_blame or busy else self._wait_for_pause(now, suspicious=suspicious)
        settlements = [returned(row, reason, wait_ms=wait, answered=answered) for row in batch]
        return [Outcome.RETURNED] * len(batch), settlements

    def _wait_for_pause(self, now: int, *, suspicious: bool) -> int:
        """Return the ms until a batch that failed is due: after the pause, suspects a little later than the probe."""
        pause = max(0, self._availability.resume_at - now)
        return pause + (pause // SUSPECTS_LATER if suspicious else 0)


def _look_behind_the_broker(answers: Sequence[AcceptAnswer]) -> None:
    """Raise `RequestFailed` where each message of a batch is answered 5xx: what the broker itself needs is away."""
    if len(answers) == 1 or any(outcome_of(answer) is not Outcome.FAILED for answer in answers):
        return
    problem = answers[0].problem
    reason = f"{problem.code}: {problem.detail}" if problem is not None else f"http_{answers[0].status}"
    seconds = problem.retry_after if problem is not None else None
    raise RequestFailed.because(
        Failure.SERVER_ERROR,
        clean(f"the broker can't accept: {reason}"),
        None if seconds is None else clamp_retry_after(seconds),
    )
