"""A database that comes back older than it was: a new incarnation, new numbers, and readers that are told."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.databases import HOLD_NUMBERS, back_up, begin_timeline, forget, postgres_of_its_own, restore
from support.waiting import until_so

from broker.__main__ import begin_incarnation
from broker.database import migrate
from embedded import EmbeddedPostgres
from embedded.postgres import _SETTINGS
from postroom import BrokerClient, Gone
from postroom._wire.administration import HistoryQuery
from postroom.chassis.exits import Exit
from postroom.chassis.postgres import acting, connected

Message = Callable[..., dict[str, Any]]

FLOOR = 1_700_000_000 << 21  # numbers of a new incarnation are above it, whatever the clock says today
MOST = 2**53  # what JSON carries exactly everywhere


@pytest.fixture
async def own(postgres_server: EmbeddedPostgres, migrated: Any, database_url: str) -> AsyncIterator[Any]:
    """The config of a broker on a database that a test may replace."""
    await migrate(database_url)
    yield msgspec.structs.replace(migrated, database_url=database_url)
    await forget(postgres_server, _name(database_url))


@pytest.fixture
async def archiving_postgres(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedPostgres]:
    """A Postgres of the test's own, whose log is enough for a standby."""
    monkeypatch.setitem(_SETTINGS, "wal_level", "replica")
    async with postgres_of_its_own(short_directory, migrate) as server:
        yield server


def _name(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


async def incarnation_of(caller: Any) -> str:
    return str((await caller.get("/v1/features")).body["incarnation"])


async def test_the_features_and_every_page_name_the_database(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    await alice.send(*(message(f"id-{n}") for n in range(3)))
    incarnation = await incarnation_of(alice)
    page = (await alice.get("/v1/history", limit=2)).body
    assert page["incarnation"] == incarnation
    rest = await alice.get("/v1/history", after=page["next_after"], incarnation=incarnation)
    assert (len(rest.body["messages"]), rest.body["incarnation"]) == (1, incarnation)


async def test_a_restored_database_is_another_one_and_goes_on_above_all_numbers(
    own: Any, postgres_server: EmbeddedPostgres, start_broker: Any, message: Message
) -> None:
    async with start_broker(own) as broker:
        await broker.add_mesh()
        await broker.member("alice").send(*(message(f"id-{n}") for n in range(3)))
        before, tokens = await incarnation_of(broker.member("alice")), broker.tokens
    await back_up(postgres_server, _name(own.database_url))
    async with start_broker(own) as broker:
        broker.tokens.update(tokens)
        await broker.member("alice").send(*(message(f"id-{n}") for n in range(3, 6)))
    await restore(postgres_server, _name(own.database_url))

    async with start_broker(own) as broker:
        broker.tokens.update(tokens)
        alice = broker.member("alice")
        after = await incarnation_of(alice)
        assert after != before
        again = [answer.history_id for answer in await alice.send(*(message(f"id-{n}") for n in range(2, 6)))]
        assert again[0] == 3  # it was in the backup
        assert FLOOR < again[1] < again[2] < again[3] < MOST

        for cursor in (4, 6, 7, again[1] - 2):  # whoever stood there has read what is lost
            gone = await alice.get("/v1/history", after=cursor)
            assert (gone.status, gone.code) == (410, "history_restored")
            assert (gone.body["resume_after"], gone.body["incarnation"]) == (3, after)
        assert (await alice.get("/v1/history", after=2, incarnation=before)).body["resume_after"] == 2
        for cursor, count in ((0, 6), (3, 3), (again[1], 2), (again[3], 0)):
            page = await alice.get("/v1/history", after=cursor, incarnation=after)
            assert (page.status, len(page.body["messages"])) == (200, count)

        async with BrokerClient(broker.url, broker.tokens["demo", "alice"]) as client:
            with pytest.raises(Gone, match="resume there") as refusal:
                [each async for each in client.history(HistoryQuery(after=6))]
            assert refusal.value.problem.resume_after == 3
            assert len([each async for each in client.history(HistoryQuery(limit=2))]) == 6


async def test_a_reader_above_every_number_that_was_given_out_is_told_though_nobody_said_restored(
    broker: Any, message: Message
) -> None:
    alice = broker.member("alice")
    last = (await alice.send_one(message("id-1"))).history_id
    assert (await alice.get("/v1/history", after=last)).body["messages"] == []
    gone = await alice.get("/v1/history", after=last + 1)
    assert (gone.status, gone.code, gone.body["resume_after"]) == (410, "history_restored", last)
    assert (await alice.get("/v1/messages")).status == 200


async def test_a_mesh_that_is_made_anew_after_a_restore_repeats_no_number(
    own: Any, postgres_server: EmbeddedPostgres, start_broker: Any, message: Message
) -> None:
    await back_up(postgres_server, _name(own.database_url))
    async with start_broker(own) as broker:
        await broker.add_mesh("late")
        assert (await broker.member("alice", "late").send_one(message("id-1"))).history_id == 1
    await restore(postgres_server, _name(own.database_url))
    async with start_broker(own) as broker:
        await broker.add_mesh("late")
        alice = broker.member("alice", "late")
        assert (await alice.send_one(message("id-1"))).history_id > FLOOR
        assert (await alice.get("/v1/history", after=1)).status == 410


async def test_an_operator_who_restored_says_so_and_a_running_broker_knows(
    own: Any, start_broker: Any, message: Message, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_broker(own) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        assert (await alice.send_one(message("id-1"))).history_id == 1
        seen = {await incarnation_of(alice)}
        last = 1
        for number in (2, 3):
            assert await begin_incarnation(own) is Exit.OK
            incarnation = await incarnation_of(alice)
            assert incarnation in capsys.readouterr().out
            history_id = (await alice.send_one(message(f"id-{number}"))).history_id
            assert history_id > max(FLOOR, last)
            seen.add(incarnation)
            last = history_id
        assert len(seen) == 3
        assert len((await alice.get("/v1/history")).body["messages"]) == 3
    async with connected(own.database_url) as connection:
        logged = await connection.fetch("SELECT * FROM mesh.operator_log WHERE noun = 'database'")
        assert [line["actor"] for line in logged] == [acting(connection)] * 2
        assert {line["key"] for line in logged} < seen


async def test_a_failover_begins_an_incarnation_before_anything_is_accepted(
    migrated: Any, archiving_postgres: EmbeddedPostgres, start_broker: Any, message: Message
) -> None:
    config = msgspec.structs.replace(migrated, database_url=archiving_postgres.url_of("own"))
    async with start_broker(config) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        assert (await alice.send_one(message("id-1"))).history_id == 1
        archiving_postgres.stop()
        begin_timeline(archiving_postgres)
        archiving_postgres.start()

        async def promoted() -> bool:
            return bool((await alice.get("/v1/features")).status == 200)

        await until_so(promoted)
        answers = [answer.history_id for answer in await alice.send(message("id-1"), message("id-2"))]
        assert (answers[0], answers[1] > FLOOR) == (1, True)
        assert len({await incarnation_of(alice), await incarnation_of(alice)}) == 1


async def test_a_restart_or_a_new_connection_is_no_restore(
    migrated: Any, own_postgres: EmbeddedPostgres, start_broker: Any, message: Message
) -> None:
    config = msgspec.structs.replace(migrated, database_url=own_postgres.url_of("own"))
    async with start_broker(config) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        before = await incarnation_of(alice)
        await asyncio.to_thread(own_postgres.stop)  # the broker's connections end meanwhile
        own_postgres.start()
        assert (await alice.send_one(message("id-1"))).history_id == 1
        assert await incarnation_of(alice) == before


async def test_a_restore_goes_by_the_rows_where_the_backup_has_the_numbers_of_later_ones(
    own: Any, start_broker: Any, message: Message
) -> None:
    """A dump reads sequences as they are, while accepts go on, and rows as they were when it began."""
    async with start_broker(own) as broker, connected(own.database_url) as connection:
        await broker.add_mesh()
        alice = broker.member("alice")
        await alice.send(*(message(f"id-{n}") for n in range(3)))
        await connection.execute("SELECT setval('mesh.history_' || id, 6) FROM mesh.mesh")
        assert await begin_incarnation(own) is Exit.OK
        assert (await alice.get("/v1/history", after=5)).body["resume_after"] == 3
        assert (await alice.send_one(message("id-3"))).history_id > FLOOR
        assert len((await alice.get("/v1/history", after=3)).body["messages"]) == 1


async def test_an_incarnation_begins_between_two_accepts(own: Any, start_broker: Any, message: Message) -> None:
    """One that is under way commits before; one that comes meanwhile takes its number afterwards."""
    async with start_broker(own) as broker, connected(own.database_url) as holding, connected(own.database_url) as eye:
        await broker.add_mesh()
        alice = broker.member("alice")

        async def wait_for_locks(statements: int) -> None:
            waiting = (
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )

            async def so() -> bool:
                return bool(await eye.fetchval(waiting) == statements)

            await until_so(so)

        async with holding.transaction():
            await holding.execute(HOLD_NUMBERS)
            first = asyncio.create_task(alice.send_one(message("id-1")))
            await wait_for_locks(1)
            beginning = asyncio.create_task(begin_incarnation(own))
            await wait_for_locks(2)
            second = asyncio.create_task(alice.send_one(message("id-2")))
            await wait_for_locks(3)
        assert await beginning is Exit.OK
        assert ((await first).history_id, (await second).history_id > FLOOR) == (1, True)
        assert (await alice.get("/v1/history", after=2)).body["resume_after"] == 1
        assert len((await alice.get("/v1/history")).body["messages"]) == 2


async def test_numbers_go_on_where_they_were_after_a_crash_of_postgres(
    migrated: Any, short_directory: Path, start_broker: Any, message: Message
) -> None:
    async with postgres_of_its_own(short_directory, migrate, durable=True) as postgres:
        config = msgspec.structs.replace(migrated, database_url=postgres.url_of("own"))
        async with start_broker(config) as broker:
            await broker.add_mesh()
            alice = broker.member("alice")
            before = [answer.history_id for answer in await alice.send(*(message(f"id-{n}") for n in range(3)))]
            server = postgres.process
            assert server is not None
            assert await asyncio.to_thread(server.end, (signal.SIGQUIT, 30.0))  # it leaves everything as a crash does
            postgres.start()
            assert (await alice.send_one(message("late"))).history_id == 4
            assert (before, len((await alice.get("/v1/history")).body["messages"])) == ([1, 2, 3], 4)
