"""Opening an inbox: one owner, files of others, and a damaged one that is set aside for a new one."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.inboxes import message
from support.outboxes import START, Clock

from inbox import Durable, Inbox
from postroom.errors import InvalidMessage, TryAgain

OpenInbox = Callable[[], Awaitable[Inbox]]


def killed(state: Path) -> None:
    """Leave the lock file as a killed daemon does."""
    (state / "inbox.lock").write_text("4711")


def damage(database: Path) -> None:
    """Overwrite a page in the middle of the file."""
    with database.open("r+b") as file:
        file.seek(database.stat().st_size // 4096 // 2 * 4096)
        file.write(b"\xff" * 4096)


def durable(
    name: str, created: str, acknowledged: int, *, delivered: int | None = None, opening: str | None = None
) -> Durable:
    """What NATS says of a consumer, by default of one to which nothing is still to come again."""
    return Durable(name, created, acknowledged if delivered is None else delivered, acknowledged, opening)


async def test_what_was_filed_is_there_after_a_restart(inbox: Inbox, open_inbox: OpenInbox) -> None:
    await inbox.file([message(1)])
    await inbox.close()
    again = await open_inbox()
    assert again.id == inbox.id
    assert again.refill_after is None
    assert await again.file([message(1)]) == 0
    await again.close()


@pytest.mark.parametrize("how", ["page", "header"])
async def test_a_damaged_file_is_set_aside_and_a_new_one_is_due_to_be_refilled(
    inbox: Inbox, open_inbox: OpenInbox, database: Path, clock: Clock, how: str
) -> None:
    await inbox.file([message(number, body="x" * 1000) for number in range(1, 101)])
    last = (await inbox.page(None, None, 1000)).messages[-1].position
    await inbox.close()
    damage(database) if how == "page" else database.write_bytes(b"this is not an inbox" * 500)
    before = database.read_bytes()
    killed(database.parent)
    clock.forward(0.002)  # in which a hundred messages came
    again = await open_inbox()
    assert (again.id != inbox.id, again.refill_after) == (True, 0)
    assert database.with_name(f"inbox.db.damaged-{START + 2}").read_bytes() == before
    assert await again.file([message(number) for number in range(1, 101)]) == 100
    assert (await again.page(None, None, 1)).messages[0].position > last
    await again.close()


async def test_a_file_that_was_removed_is_refilled_above_the_positions_that_it_gave(
    inbox: Inbox, open_inbox: OpenInbox, database: Path, clock: Clock
) -> None:
    assert inbox.refill_after is None
    await inbox.file([message(1)])
    (before,) = (await inbox.page(None, None, 1)).messages
    await inbox.close()
    database.unlink()
    clock.forward(3600)
    again = await open_inbox()
    assert again.refill_after == 0
    await again.file([message(1)])
    (after,) = (await again.page(None, None, 1)).messages
    assert after.position > before.position
    await again.close()


async def test_a_file_holds_what_it_has_noted_of_its_own_consumer(inbox: Inbox, open_inbox: OpenInbox) -> None:
    assert await inbox.holds(durable("alice", "monday", 0))
    await inbox.file([message(1)], delivered=7)
    await inbox.file([], delivered=9)
    await inbox.file([message(2)], delivered=8)  # redelivered to a batch that came to disk later
    assert await inbox.holds(durable("alice", "monday", 9))
    assert await inbox.holds(durable("alice", "tuesday", 0))  # a new consumer counts from one
    await inbox.file([message(3)], delivered=2)
    assert await inbox.holds(durable("alice", "tuesday", 2))
    assert await inbox.holds(durable("bob", "wednesday", 0))  # the token's owner is another, and then the first again
    await inbox.file([message(4)], delivered=1)
    assert await inbox.holds(durable("alice", "tuesday", 2))
    await inbox.close()
    again = await open_inbox()
    assert (again.id, again.refill_after) == (inbox.id, None)
    await again.close()


@pytest.mark.parametrize(("created", "acknowledged"), [("monday", 8), ("tuesday", 1)])
async def test_a_file_that_lacks_what_was_acknowledged_becomes_another_that_is_refilled(
    inbox: Inbox, open_inbox: OpenInbox, clock: Clock, created: str, acknowledged: int
) -> None:
    assert await inbox.holds(durable("alice", "monday", 0))
    await inbox.file([message(1)], delivered=7)
    (before,) = (await inbox.page(None, None, 10)).messages
    clock.forward(3600)
    assert not await inbox.holds(durable("alice", created, acknowledged))
    await inbox.close()
    again = await open_inbox()
    assert (again.id != inbox.id, again.refill_after) == (True, 0)
    assert await again.holds(durable("alice", "wednesday", 0))
    assert await again.file([message(1), message(2)]) == 1
    found = (await again.page(None, None, 10)).messages
    assert found[0] == before
    assert found[1].position > clock()
    await again.close()


async def test_a_file_holds_what_it_has_if_its_consumer_noted_this_opening_or_the_one_before(
    inbox: Inbox, open_inbox: OpenInbox
) -> None:
    """A daemon that is killed while it opens the file may not come to have its consumer note it."""
    noted, said = [], None
    for noting in (False, True, False, False, True, True):
        assert await inbox.holds(durable("alice", "monday", 0, opening=said))
        said = inbox.opening if noting else said
        noted.append(inbox.opening)
        await inbox.close()
        inbox = await open_inbox()
    assert len(set(noted)) == len(noted)
    assert inbox.refill_after is None
    await inbox.close()


async def test_a_file_that_was_opened_since_is_older_whatever_its_consumer_still_waits_for(
    inbox: Inbox, open_inbox: OpenInbox, database: Path
) -> None:
    """Also one from before its first consumer."""
    await inbox.close()
    copies = [database.read_bytes()]
    said = None
    for number in (1, 2):
        opened = await open_inbox()
        assert await opened.holds(durable("alice", "monday", 0, delivered=9, opening=said))
        await opened.file([message(number)], delivered=number)
        said = opened.opening
        await opened.close()
        copies.append(database.read_bytes())
    database.write_bytes(copies.pop())
    last = await open_inbox()
    assert await last.holds(durable("alice", "monday", 0, delivered=9, opening=said))
    said = last.opening
    await last.close()
    for copy in copies:
        database.write_bytes(copy)
        older = await open_inbox()
        assert not await older.holds(durable("alice", "monday", 0, delivered=9, opening=said))
        await older.close()
        again = await open_inbox()
        assert (again.id != last.id, again.refill_after) == (True, 0)
        await again.close()


async def test_a_consumer_that_came_back_older_has_its_deliveries_counted_from_where_it_is(
    inbox: Inbox, open_inbox: OpenInbox, database: Path
) -> None:
    assert await inbox.holds(durable("alice", "monday", 0))
    await inbox.file([message(1)], delivered=100)
    await inbox.close()
    again = await open_inbox()
    assert await again.holds(durable("alice", "monday", 40, delivered=50, opening=inbox.opening))
    copy = database.read_bytes(), database.with_name("inbox.db-wal").read_bytes()
    await again.file([message(2)], delivered=60)
    await again.close()
    database.write_bytes(copy[0])
    database.with_name("inbox.db-wal").write_bytes(copy[1])
    older = await open_inbox()
    assert not await older.holds(durable("alice", "monday", 60, opening=again.opening))
    await older.close()


async def test_positions_of_an_older_file_go_on_above_those_that_were_given_while_the_clock_is_behind(
    inbox: Inbox, open_inbox: OpenInbox, database: Path, clock: Clock
) -> None:
    assert await inbox.holds(durable("alice", "monday", 0))
    await inbox.close()
    copy = database.read_bytes()
    lost = await open_inbox()
    assert await lost.holds(durable("alice", "monday", 0))
    await lost.file([message(number) for number in range(1, 31)], delivered=30)
    given = (await lost.page(None, None, 100)).messages[-1].position
    await lost.close()
    database.write_bytes(copy)
    clock.forward(-86_400)
    older = await open_inbox()
    assert not await older.holds(durable("alice", "monday", 30))
    await older.close()
    again = await open_inbox()
    await again.file([message(1)])
    assert (await again.page(None, None, 1)).messages[0].position > given
    await again.close()


async def test_a_reader_that_is_ahead_of_the_file_waits_until_that_was_compared(
    inbox: Inbox, open_inbox: OpenInbox, clock: Clock
) -> None:
    assert await inbox.holds(durable("alice", "monday", 0))
    await inbox.file([message(1)], delivered=1)
    (newest,) = (await inbox.page(None, None, 10)).messages
    ahead = str(newest.position + 1)
    with pytest.raises(InvalidMessage):
        await inbox.start(ahead, None)
    await inbox.close()
    again = await open_inbox()
    assert await again.start(str(newest.position), None) == newest.position
    with pytest.raises(TryAgain):
        await again.start(ahead, None)
    clock.forward(3600)
    assert not await again.holds(durable("alice", "monday", 2))
    await again.close()
    restored = await open_inbox()
    assert await restored.start(ahead, None) == newest.position + 1
    await restored.close()


async def test_a_refill_goes_on_where_it_had_come_to(inbox: Inbox, open_inbox: OpenInbox, database: Path) -> None:
    await inbox.close()
    database.rename(database.with_name("inbox.db.damaged-1"))  # as a crash between the two leaves it
    first = await open_inbox()
    assert first.refill_after == 0
    await first.refilled_to(41)
    await first.close()
    second = await open_inbox()
    assert second.refill_after == 41
    await second.refilled_to(None)
    await second.close()
    third = await open_inbox()
    assert third.refill_after is None
    await third.close()
