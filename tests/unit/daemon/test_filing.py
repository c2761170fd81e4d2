"""What the inbox's handler says of a batch: done once it is on disk, dead where it makes no sense, else nothing yet."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from support.inboxes import message

from daemon.receiver import FilingCounters, InboxHandler, consumer_settings
from inbox import Inbox
from postroom.claims import Dead, Done, Outcome
from postroom.delivery.message import Delivery


def delivery(number: int, data: bytes) -> Delivery:
    moment = datetime(2026, 11, 21, tzinfo=UTC)
    return Delivery("demo.inbox.alice", data, {}, f"{number}.alice", "DEMO_INBOX", number, 1, moment)


class Settled:
    """What was settled, by sequence."""

    def __init__(self) -> None:
        self.outcomes: dict[int, Outcome] = {}

    async def __call__(self, delivery: Delivery, outcome: Outcome) -> None:
        self.outcomes[delivery.sequence] = outcome


def batch(*numbers: int) -> list[Delivery]:
    return [delivery(number, msgspec.json.encode(message(number))) for number in numbers]


async def test_a_batch_is_done_once_it_is_filed_and_what_makes_no_sense_is_dead(tmp_path: Path) -> None:
    settled, counters = Settled(), FilingCounters()
    foreign = msgspec.json.encode(message(8, mesh="other"))
    unnumbered = msgspec.json.encode(message(9, history_id=0))
    odd = [delivery(7, b"{}"), delivery(8, foreign), delivery(9, unnumbered)]
    async with await Inbox.open(tmp_path) as inbox:
        await InboxHandler(inbox, "demo", counters).handle([*batch(1, 2), *odd, *batch(3)], settled)
        await InboxHandler(inbox, "demo", counters).handle(batch(3, 4), settled)
    assert {number for number, outcome in settled.outcomes.items() if outcome == Done()} == {1, 2, 3, 4}
    assert {number for number, outcome in settled.outcomes.items() if isinstance(outcome, Dead)} == {7, 8, 9}
    assert counters == FilingCounters(filed=4, known=1, refused=3)


async def test_a_batch_waits_in_hand_while_the_disk_is_full(tmp_path: Path) -> None:
    settled = Settled()
    naps: list[str | None] = []
    async with await Inbox.open(tmp_path) as inbox:
        connection = inbox._store
        await connection.run(lambda db: db.execute("PRAGMA max_page_count = 1"))

        async def nap(_: float) -> None:
            naps.append(filing.trouble)
            assert settled.outcomes == {}
            if len(naps) == 3:
                await connection.run(lambda db: db.execute("PRAGMA max_page_count = 100000"))

        filing = InboxHandler(inbox, "demo", FilingCounters(), sleep=nap)
        large = delivery(1, msgspec.json.encode(message(1, body="x" * 100_000)))
        await filing.handle([large], settled)
    assert settled.outcomes == {1: Done()}
    assert len(naps) == 3
    assert "the disk is full" in str(naps[0])
    assert filing.trouble is None


async def test_a_batch_that_waits_goes_back_when_the_daemon_stops(tmp_path: Path) -> None:
    settled = Settled()
    async with await Inbox.open(tmp_path) as inbox:
        await inbox._store.run(lambda db: db.execute("PRAGMA max_page_count = 1"))

        async def stop(_: float) -> None:
            filing.stop()

        filing = InboxHandler(inbox, "demo", FilingCounters(), sleep=stop)
        large = delivery(2, msgspec.json.encode(message(2, body="x" * 100_000)))
        await asyncio.wait_for(filing.handle([large], settled), 20)
    assert 2 not in settled.outcomes


def test_each_file_has_a_consumer_of_its_own_within_the_length_of_a_name() -> None:
    settings = consumer_settings("demo", "a" * 64, "01KAMJ8K4E6ZB6R2W9CJ7Q4S3T")
    assert settings.durable == "a" * 32 + "__01KAMJ8K4E6ZB6R2W9CJ7Q4S3T"
    assert settings.filter_subjects == [f"demo.inbox.{'a' * 64}"]
    other = consumer_settings("demo", "a" * 64, "01KAMJ8K4E6ZB6R2W9CJ7Q4S3V")
    assert other.durable != settings.durable
