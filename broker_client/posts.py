"""One post: a batch goes to the broker, its answers become settlements, and they are stored in one transaction.

And the search for the one message that makes every post with it fail.
"""

import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from random import Random
from typing import Final, NamedTuple

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
from broker_client.channel import Failure, RequestFailed
from broker_client.link import BrokerLink
from broker_client.pace import Availability
from broker_client.settings import RelaySettings
from outbox import ClaimedRow, Outbox, Post, Settlement, Verdict
from postroom._wire import spans
from postroom._wire.accept import AcceptAnswer
from postroom._wire.retry import clamp_retry_after
from postroom.chassis.logs import clean
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

SUSPECTS_LATER: Final = 4  # by this part of a pause, so that the next probe takes other rows where there are any
OUTBOX_STOPPED: Final = frozenset({"outcome_unknown", "stopping"})  # codes of an outbox that has stopped writing
STORAGE_SECONDS: Final = 1.0  # between two tries to store a settlement, when the disk is full
MOST_SUSPECTS: Final = 10_000  # rows remembered; the oldest are forgotten, which only makes the search longer
_ANY_SIZE: Final = sys.maxsize


class Suspicion(NamedTuple):
    """What is known of a suspect row: see `Suspects.failed`."""

    largest: int  # the batch it may be posted in
    answered: int  # posts that had been answered when it last failed
    proven: bool = False  # it failed alone while the broker answered others


class Suspects:
    """The rows that were in a batch that failed as a whole, and not answered since (docs/contract/send.md#send-64).

    Each may only be posted again in a batch of half the size, so a batch shrinks around its cause. It is kept in memory
    only: after a restart the search begins again.
    """

    def __init__(self) -> None:
        self._rows: dict[str, Suspicion] = {}

    def failed(self, batch: Sequence[ClaimedRow], answered: int) -> bool:
        """Suspect each row of `batch`, which failed when `answered` posts had been answered, ever.

        Returns whether the batch is to blame, not the broker: every row of it has failed before, and the broker has
        answered other posts since. A single message that is to blame stays so until it is answered.
        """
        to_blame = all(
            (known := self._rows.get(row.row_id)) is not None and (known.proven or known.answered < answered)
            for row in batch
        )
        suspicion = Suspicion(max(1, len(batch) // 2), answered, proven=to_blame and len(batch) == 1)
        for row in batch:
            self._rows.pop(row.row_id, None)
            self._rows[row.row_id] = suspicion
        for row_id in list(self._rows)[: max(0, len(self._rows) - MOST_SUSPECTS)]:
            del self._rows[row_id]
        return to_blame

    def clear(self, batch: Iterable[ClaimedRow]) -> None:
        """Forget the rows of a batch that was answered."""
        if self._rows:
            for row in batch:
                self._rows.pop(row.row_id, None)

    def divide(self, rows: Sequence[ClaimedRow]) -> list[list[ClaimedRow]]:
        """Split claimed rows into batches that no suspect is too large for.

        Rows that are not suspect come first, then suspects, those that failed longest ago before the others: the first
        ones are the most likely to be accepted.
        """
        if not self._rows:
            return [list(rows)] if rows else []
        order = {row_id: number for number, row_id in enumerate(self._rows)}
        groups: dict[int, list[ClaimedRow]] = {}
        for row in sorted(rows, key=lambda row: order.get(row.row_id, -1)):
            suspicion = self._rows.get(row.row_id)
            groups.setdefault(suspicion.largest if suspicion else _ANY_SIZE, []).append(row)
        return [
            group[start : start + size]
            for size, group in sorted(groups.items(), reverse=True)
            for start in range(0, len(group), size)
        ]


class Poster:
    """Posts batches and settles them; it shares `Availability` and `Suspects` with the relay's loop."""

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
        ended: Callable[[], None],
    ) -> None:
        """Call `ended` at the end of each post, before its settlement."""
        self._outbox = outbox
        self._link = link
        self._settings = settings
        self._availability = availability
        self._clock = clock
        self._waits = Waits(rng, settings)
        self._sleep = sleep
        self._ended = ended
        self.under_way = 0  # posts without an answer
        self.suspects = Suspects()
        self.counters = RelayCounters()

    async def relay(self, batch: Sequence[ClaimedRow]) -> None:
        """Post `batch` and settle it; posting twice is harmless, since the broker keeps a dedupe row of what it has."""
        pauses, at, began, started = self._availability.pauses, self._clock(), time.time_ns(), time.monotonic()
        self.under_way += 1
        try:
            answers = await self._link.accept(batch)
            _raise_if_all_failed(answers)
        except RequestFailed as error:
            result, outcomes, settlements = error.failure.value, *self._failed(batch, error, pauses)
        else:
            result, outcomes, settlements = "answered", *self._answered(batch, answers, pauses)
        finally:
            self.under_way -= 1
            self._ended()
        took = time.monotonic() - started  # the clock may have been set meanwhile
        self.counters.batch(result, outcomes, took)
        if spans.wanted():
            _record(batch, settlements, began)
        await self.settle(settlements, Post(at, round(took * 1000), self._link.address))

    async def settle(self, settlements: Sequence[Settlement], post: Post | None = None) -> None:
        """Store the settlements in one transaction; while the disk is full, try again until it is not.

        An outbox that has stopped takes nothing more: the rows stay `inflight`, and the next start puts them back.
        """
        while True:
            try:
                # where one post at a time may be under way the next waits for this
                await self._outbox.settle(settlements, post, patient=post is not None and self._availability.slots > 1)
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
        answered = None if untaken and not error.by_proxy else False
        to_blame = suspicious and self.suspects.failed(batch, self._availability.answered)
        if to_blame and len(batch) == 1:
            _log.warning("message_backed_off", client_message_id=batch[0].client_message_id, reason=reason)
            return [Outcome.FAILED], [backed_off(batch[0], reason, self._waits, answered=answered)]
        if not to_blame:
            self._availability.failed(error, pauses, now)
        wait = 0 if to_blame or busy else round(self._availability.pause_left(now) * 1000)
        if suspicious:
            wait += wait // SUSPECTS_LATER
        settlements = [returned(row, reason, wait_ms=wait, answered=answered) for row in batch]
        return [Outcome.RETURNED] * len(batch), settlements


def _record(batch: Sequence[ClaimedRow], settlements: Sequence[Settlement], began: int) -> None:
    """Record a span for each message of a post, from its beginning until the answer."""
    for row, settlement in zip(batch, settlements, strict=True):
        code, _, detail = (settlement.last_error or settlement.verdict).partition(": ")
        spans.record(
            spans.RELAY,
            row.destination,
            row.client_message_id,
            spans.carried_by(row.payload).traceparent,
            began=began,
            error=None if settlement.verdict is Verdict.DONE else (code, detail),
        )


def _raise_if_all_failed(answers: Sequence[AcceptAnswer]) -> None:
    """Raise `RequestFailed` if every message of a batch is answered 5xx: what the broker itself needs is unreachable.

    That a single message is answered 5xx shows nothing about the others.
    """
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
