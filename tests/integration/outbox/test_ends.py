"""Which rows the broker has yet to hear of: those that died or were retired, at least once, whatever happens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.outboxes import START, WHY, Clock, accepted, opened, row_in, send

from outbox import Accepted, Outbox, RowFilter, Settlement, Verdict
from outbox.recover import recover
from postroom._wire.sends import EndedRow

OpenOutbox = Callable[..., Awaitable[Outbox]]


async def ends(outbox: Outbox) -> list[EndedRow]:
    return (await outbox.unreported(100))[1]


async def states(outbox: Outbox) -> list[tuple[str, str]]:
    return [(one.row.client_message_id, one.row.status) for one in await ends(outbox)]


@pytest.mark.parametrize("status", ["pending", "inflight", "done"])
async def test_a_row_that_did_not_end_badly_is_not_reported(outbox: Outbox, status: str) -> None:
    await row_in(outbox, status)
    assert await ends(outbox) == []


async def test_a_row_is_to_be_reported_until_the_broker_has_heard_of_it(
    outbox: Outbox, open_outbox: OpenOutbox
) -> None:
    await row_in(outbox, "dead", "a")
    await row_in(outbox, "aborted", "b")
    await accepted(outbox, send("c"))
    await outbox.expire(START + 1)
    assert await states(outbox) == [("a", "dead"), ("b", "aborted"), ("c", "dead")]
    numbers, _ = await outbox.unreported(2)
    await outbox.reported(numbers)
    await outbox.close()
    again = await open_outbox()
    assert await states(again) == [("c", "dead")]
    await again.reported((await again.unreported(100))[0])
    assert await ends(again) == []
    await again.close()


async def test_a_requeue_is_reported_with_who_did_it_and_the_successor(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "dead", "a")
    after = await outbox.act("requeue", row_id, new_client_message_id="b", **WHY)
    (one,) = await ends(outbox)
    assert (one.row.status, one.row.superseded_by, one.successor) == ("aborted", after.id, "b")
    assert [(line.verb, line.actor, line.reason) for line in one.log] == [("requeue", "uid 0 (root)", WHY["reason"])]


async def test_a_row_that_ended_again_after_it_was_read_is_reported_again(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "dead", "a")
    numbers, _ = await outbox.unreported(100)
    await outbox.act("abort", row_id, **WHY)
    await outbox.reported(numbers)
    assert await states(outbox) == [("a", "aborted")]


async def test_a_dead_row_that_turns_out_to_be_accepted_is_reported_as_done(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "inflight", "a")
    await outbox.settle([Settlement(row_id, Verdict.DEAD, last_error="expired: too old", answered=False)])

    async def look_up(_: object) -> list[Accepted]:
        return [Accepted("B", 1)]

    outbox._look_up = look_up  # type: ignore[assignment]
    await outbox.bulk("abort", RowFilter(ids=[row_id]), **WHY)
    assert await states(outbox) == [("a", "done")]


async def test_a_row_that_has_moved_is_still_reported(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "dead", "a")
    await outbox.act("abort", row_id, **WHY)
    await row_in(outbox, "pending", "b")
    await outbox.prune(clock.now + 1, **WHY)
    assert await states(outbox) == [("a", "aborted")]


async def test_after_a_recovery_every_row_that_ended_is_reported_again(
    outbox: Outbox, state: Path, database: Path, open_outbox: OpenOutbox
) -> None:
    await row_in(outbox, "dead", "a")
    await row_in(outbox, "done", "b")
    await outbox.reported((await outbox.unreported(100))[0])
    await outbox.close()
    recover(state)
    with opened(database) as db:
        assert db.execute("SELECT count(*) FROM outbox_unreported").fetchone() == (1,)
    again = await open_outbox()
    assert await states(again) == [("a", "dead")]
    await again.close()
