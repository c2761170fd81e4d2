"""One verb for many rows, each as if it had a transaction of its own (docs/contract/send.md#send-92)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from outbox.errors import already_accepted
from outbox.model import RowFilter
from outbox.operating import Act, Order, why_not
from outbox.outcomes import Outcomes
from outbox.reading import Reader, seq_of
from outbox.relaying import WalkedPast
from postroom._wire.operations import MAX_IDS, VERBS, Verb
from postroom._wire.sends import BulkFailure, BulkResult, OutboxRow
from postroom.chassis.store import Store
from postroom.errors import PostroomError

_ROWS: Final = MAX_IDS  # after which one request ends: its answer stays far below what a client reads


class Bulk(NamedTuple):
    """A verb, who gave it, and what it works on."""

    verb: Verb
    order: Order
    reader: Reader
    store: Store
    outcomes: Outcomes
    walked: WalkedPast
    changed: Callable[[str], None]

    async def run(self, row_filter: RowFilter, now: int, *, dry_run: bool, cursor: str | None) -> BulkResult:
        """Do the verb to every matching row, as `Outbox.bulk` says."""
        result = BulkResult(dry_run=dry_run, matched=0, done=[], skipped=[], failed=[])
        order = self.order
        unseen = set(row_filter.ids or ())
        # `until`: not the successors that it writes itself
        after, until = (None, await self.reader.last_seq()) if cursor is None else _span(cursor)
        async for page in self.reader.pages(row_filter, now, after, until):
            unseen.difference_update(*((row.id, row.client_message_id) for row in page.rows))
            order = await self._do(order, page.rows, result)
            if row_filter.ids is None and page.next_cursor is not None and result.matched >= _ROWS:
                result.next_cursor = f"{page.next_cursor}-{until}"
                return result
        async for page in self.reader.pages(RowFilter(ids=sorted(unseen)), now, None, until):
            unseen.difference_update(*((row.id, row.client_message_id) for row in page.rows))
            result.skipped += [row.id for row in page.rows]
        result.failed += [BulkFailure(id=each, code="row_not_found", detail="no such row") for each in sorted(unseen)]
        return result

    async def _do(self, order: Order, rows: Sequence[OutboxRow], result: BulkResult) -> Order:
        """Do the verb to those of a page whose state allows it, or say which they are; return the order to go on by."""
        result.matched += len(rows)
        able = [row.id for row in rows if why_not(self.verb, row.status, held=row.held) is None]
        result.skipped += [row.id for row in rows if why_not(self.verb, row.status, held=row.held) is not None]
        if result.dry_run:
            result.done += able
            return order
        if VERBS[self.verb].retires and order.doubt is None:  # a broker that is away is asked once
            learned = await self.outcomes.learn(able)
            order = order._replace(doubt=learned.doubt)
            for row_id, accepted in learned.accepted.items():
                self._note(row_id, already_accepted(self.verb, row_id, accepted.broker_message_id), result)
            able = [row_id for row_id in able if row_id not in learned.accepted]
        futures = [self.store.submit(Act(self.verb, row_id, order, self.walked)) for row_id in able]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        for row_id, outcome in zip(able, outcomes, strict=True):
            self._note(row_id, outcome, result)
        return order

    def _note(self, row_id: str, outcome: object, result: BulkResult) -> None:
        if isinstance(outcome, PostroomError) and outcome.code == "wrong_state":
            result.skipped.append(row_id)  # it changed since it was listed
        elif isinstance(outcome, PostroomError):
            result.failed.append(BulkFailure(id=row_id, code=outcome.code, detail=str(outcome)))
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            result.done.append(row_id)
            self.changed(row_id)


def _span(cursor: str) -> tuple[str, int]:
    """Read where a bulk verb goes on, and at which row it ends; raises `InvalidMessage`."""
    after, _, until = cursor.partition("-")
    return after, seq_of(until)
