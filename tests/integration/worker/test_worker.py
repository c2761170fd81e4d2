"""The worker as a process: what a broker accepted is in JetStream, and an operator can see and repeat it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from operator import not_
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import nats
import pytest
from support.jetstream import messages_in
from support.mailroom import worker
from support.operated import operated_broker
from support.terminal import Terminal
from support.waiting import until_so
from support.zygote import Piped

from broker.authentication import Member
from broker.config import RetentionConfig
from broker.database import QUERIES, Database, migrate
from broker.items import Item, check, read_item, split
from broker.store import AcceptStore, Candidate, MessageIds
from embedded import EmbeddedNats
from postroom._wire.administration import HistoryMessage
from postroom._wire.message import MAX_BODY_BYTES, prepare
from postroom.delivery.publication import Outgoing, Place
from postroom.delivery.publication.link import Link
from postroom.delivery.publication.postgres import DELIVERIES, PostgresClaim, PostgresSource
from postroom.delivery.publication.record import Record
from postroom.delivery.settings import NatsSettings, PublisherSettings, RecordSettings
from postroom.worker.upkeep import _CALL_SECONDS

DIGEST = b"d" * 32
ALICE = Member(name="alice", role="member", mesh_id=1, mesh="demo", member_id=1, token_sha256=DIGEST)
_decode = msgspec.json.Decoder(HistoryMessage).decode


class Accepting:
    """The accept transaction of a broker in the mesh `demo`, without the HTTP before it."""

    def __init__(self, database: Database, url: str) -> None:
        self.url = url
        self.pool = database.accepting
        self._store = AcceptStore(database, RetentionConfig(), MessageIds())

    async def prepare(self) -> None:
        await self.pool.execute(QUERIES["create_mesh"], "demo")
        await self.pool.execute(
            "INSERT INTO mesh.member (mesh_id, name, role, token_sha256) "
            "VALUES (1, 'alice', 'member', $1), (1, 'bob', 'member', $2)", DIGEST, b"e" * 32,
        )  # fmt: skip
        await self.pool.execute("INSERT INTO mesh.topic (mesh_id, name) VALUES (1, 'orders')")
        await self.pool.execute("INSERT INTO mesh.queue (mesh_id, name) VALUES (1, 'work'), (1, 'mail.post.send')")
        await self.pool.execute("INSERT INTO mesh.topic_subscription (topic_id, member_id) VALUES (1, 1), (1, 2)")

    async def send(
        self, *messages: dict[str, Any], traceparent: str | None = None, sender: Member = ALICE
    ) -> list[str]:
        """Accept messages, and return their ids."""
        candidates = [_candidate(message, traceparent) for message in messages]
        written = await self._store.write(sender, candidates, lambda: True)
        assert all(one.history_id for one in written)
        return [str(one.broker_message_id) for one in written]

    async def published(self) -> None:
        """Wait until nothing waits."""
        waiting = (
            "SELECT (SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL)"
            " + (SELECT count(*) FROM mesh.delivery_queue WHERE published_at IS NULL)"
        )
        await until_so(lambda: self.pool.fetchval(waiting), holds=not_)


def _candidate(message: dict[str, Any], traceparent: str | None) -> Candidate:
    prepared = prepare(msgspec.json.encode(message), traceparent=traceparent)
    body = {
        "client_message_id": prepared.client_message_id,
        "request_fingerprint": prepared.fingerprint.hex(),
        "message": msgspec.Raw(prepared.payload),
    }
    (raw,) = split(msgspec.json.encode({"messages": [body]}), 1)
    item = read_item(0, raw)
    assert isinstance(item, Item)
    return Candidate(item, check(item, MAX_BODY_BYTES))


@pytest.fixture
async def accepting(database_url: str) -> AsyncIterator[Accepting]:
    await migrate(database_url)
    database = await Database.open(database_url, connections=2)
    accepting = Accepting(database, database_url)
    await accepting.prepare()
    yield accepting
    await database.close()


def urls(accepting: Accepting, server: EmbeddedNats) -> dict[str, str]:
    return {"POSTROOM_DATABASE_URL": accepting.url, "POSTROOM_NATS_URL": server.url}


async def test_workers_publish_what_a_broker_rings_for(accepting: Accepting, own_nats: EmbeddedNats) -> None:
    patient = {f"POSTROOM_WORKER_{source}_IDLE_SECONDS": "60" for source in ("EVENTS", "DELIVERIES")}
    listening = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND datname = current_database()"
    settings = urls(accepting, own_nats) | patient
    with worker(**settings), worker(**settings):
        await until_so(lambda: accepting.pool.fetchval(listening), holds=lambda listeners: listeners > 1)
        for number in range(20):
            await accepting.send({"to": "topic:orders", "body": f"{number}"}, {"to": "dm:bob", "body": f"{number}"})
        await asyncio.wait_for(accepting.published(), 30)

    bodies = [json.loads(one.data)["message"]["body"] for one in await messages_in(own_nats, "DEMO_EVENTS")]
    assert bodies == [f"{number}" for number in range(20)]


@asynccontextmanager
async def held_before_its_commit(accepting: Accepting, message: dict[str, Any]) -> AsyncIterator[None]:
    """An accept that has number 1, and does not commit before this ends."""
    await accepting.pool.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.mesh_id = 1 AND NEW.history_id = 1 THEN PERFORM pg_advisory_xact_lock(7); END IF; RETURN NULL; END $$;"
        "CREATE TRIGGER w AFTER INSERT ON mesh.message_history FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    holder = await asyncpg.connect(accepting.url)
    try:
        await holder.execute("SELECT pg_advisory_lock(7)")
        held = asyncio.create_task(accepting.send(message))
        waiting = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted)"
        await until_so(lambda: holder.fetchval(waiting))
        yield
    finally:
        await holder.close()
    await held


async def test_a_recipient_gets_its_messages_in_the_order_of_the_history_whichever_commits_first(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    """An accept that is under way holds up what is behind it in its mesh, and in no other."""
    await accepting.pool.execute(QUERIES["create_mesh"], "sea")
    await accepting.pool.execute(
        "INSERT INTO mesh.member (mesh_id, name, role, token_sha256) VALUES (2, 'zoe', 'member', $1)", b"z" * 32
    )
    sailor = Member(name="zoe", role="member", mesh_id=2, mesh="sea", member_id=3, token_sha256=b"z" * 32)
    with worker(**urls(accepting, own_nats)):
        async with held_before_its_commit(accepting, {"to": "dm:bob", "body": "lower"}):
            await accepting.send({"to": "dm:bob", "body": "higher"})
            (alongside,) = await accepting.send({"to": "dm:zoe", "body": "ahoy"}, sender=sailor)
            published = "SELECT published_at FROM mesh.delivery_queue WHERE broker_message_id = $1::uuid"
            await until_so(lambda: accepting.pool.fetchval(published, alongside))
        await asyncio.wait_for(accepting.published(), 30)
    bodies = [json.loads(one.data)["body"] for one in await messages_in(own_nats, "DEMO_INBOX")]
    assert bodies == ["lower", "higher"]


async def test_what_was_accepted_becomes_an_event_a_command_and_inbox_messages(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    event, command, named, dm = await accepting.send(
        {"to": "topic:orders", "body": "hello", "meta": {"event_version": 2}},
        {"to": "queue:work", "body": "do it"},
        {"to": "queue:mail.post.send", "body": "do it"},
        {"to": "dm:bob", "body_base64": "AAH/"},
        traceparent=trace,
    )
    with worker(**urls(accepting, own_nats)):
        await asyncio.wait_for(accepting.published(), 30)

    (published,) = await messages_in(own_nats, "DEMO_EVENTS")
    assert (published.subject, published.headers["Nats-Msg-Id"]) == ("demo.event.orders.v2", event)
    assert published.headers["traceparent"] == trace
    assert json.loads(published.data)["message"]["body"] == "hello"
    commands = [(one.subject, one.headers["Nats-Msg-Id"]) for one in await messages_in(own_nats, "DEMO_COMMANDS")]
    assert sorted(commands) == [("cmd.demo.default.work.run", command), ("cmd.demo.mail.post.send", named)]
    inbox = await messages_in(own_nats, "DEMO_INBOX")
    found = {
        one.headers["Nats-Msg-Id"]: (one.subject, msgspec.json.decode(one.data, type=HistoryMessage)) for one in inbox
    }
    assert set(found) == {f"{event}.alice", f"{event}.bob", f"{dm}.bob"}
    subject, message = found[f"{dm}.bob"]
    assert (subject, message.broker_message_id, message.sender, message.to, message.body_base64) == (
        "demo.inbox.bob", dm, "alice", "dm:bob", "AAH/",
    )  # fmt: skip
    assert found[f"{event}.bob"][1].body == "hello"


async def test_a_member_gets_its_messages_in_the_order_of_the_history(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    for first in range(0, 300, 50):
        await accepting.send(*({"to": "dm:bob", "body": str(n)} for n in range(first, first + 50)))
    with worker(**urls(accepting, own_nats)), worker(**urls(accepting, own_nats)):
        await asyncio.wait_for(accepting.published(), 30)
    bodies = [json.loads(one.data)["body"] for one in await messages_in(own_nats, "DEMO_INBOX")]
    assert bodies == [str(n) for n in range(300)]


EMIT = "SELECT postroom.emit($1, 'order', '17', 'order_paid', '{}')"
COMMAND = "SELECT postroom.emit_command($1, 'work', '{}')"


@pytest.mark.parametrize(("statement", "subject"), [(EMIT, "event.order_paid.v1"), (COMMAND, "default.work.run")])
async def test_what_is_emitted_for_a_mesh_that_there_is_not_is_refused(
    accepting: Accepting, statement: str, subject: str
) -> None:
    await accepting.pool.execute(statement, "demo")
    with pytest.raises(asyncpg.ForeignKeyViolationError, match="UNKNOWN_MESH: there is no mesh shop, ") as refused:
        await accepting.pool.execute(statement, "shop")
    assert refused.value.constraint_name == "UNKNOWN_MESH"
    assert subject in str(refused.value)
    assert "postroom mesh create shop" in str(refused.value)
    assert await accepting.pool.fetchval("SELECT count(*) FROM postroom.outbox_events") == 1


async def test_a_service_may_emit_though_it_may_not_see_the_meshes(accepting: Accepting) -> None:
    connection = await asyncpg.connect(accepting.url.replace("postroom@", "postgres@"))
    try:
        await connection.execute(
            "BEGIN; CREATE ROLE a_service; GRANT USAGE ON SCHEMA postroom TO a_service; "
            "GRANT INSERT ON postroom.outbox_events TO a_service; SET LOCAL ROLE a_service"
        )
        await connection.execute(EMIT, "demo")
        with pytest.raises(asyncpg.ForeignKeyViolationError):
            await connection.execute(EMIT, "shop")
    finally:
        await connection.close()  # the role goes with the transaction


async def test_what_a_worker_declares_a_stream_for_may_be_emitted_without_a_mesh(
    accepting: Accepting, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    config = tmp_path / "worker.toml"
    config.write_text(
        f'database_url = "{accepting.url}"\n[nats]\nurl = "{own_nats.url}"\n'
        '[[streams]]\nname = "SHOP"\nsubjects = ["shop.event.>"]\n'
    )
    with worker("--config", str(config)):
        declared = "SELECT count(*) FROM postroom.declared_subjects"
        await until_so(lambda: accepting.pool.fetchval(declared))
        await accepting.pool.execute(EMIT, "shop")
        await asyncio.wait_for(accepting.published(), 30)
        for statement, mesh in ((COMMAND, "shop"), (EMIT, "shopping")):
            with pytest.raises(asyncpg.ForeignKeyViolationError):
                await accepting.pool.execute(statement, mesh)
    assert [one.subject for one in await messages_in(own_nats, "SHOP")] == ["shop.event.order_paid.v1"]


async def test_of_two_deliveries_with_one_number_of_a_stream_both_are_published_again(accepting: Accepting) -> None:
    """One was lost in a power cut: which, nobody knows. Of a stream that was made anew only the older one is lost."""
    await accepting.send({"to": "dm:alice", "body": "1"}, {"to": "dm:bob", "body": "2"})
    created = datetime(2026, 1, 1, tzinfo=UTC)
    first, second = await claim_deliveries(accepting)
    async with accepting.pool.acquire() as connection:
        claim = PostgresClaim(deliveries(accepting), connection, (first, second), more=False)

        async def mark(message: Outgoing, created_at: datetime) -> bool:
            return await claim.settle([(message, Place("DEMO_INBOX", created_at, 1, duplicate=False))], [], [])

        assert not await mark(first, created)
        assert await mark(second, created)
        states = await connection.fetch("SELECT published_at, epoch FROM mesh.delivery_queue")
        assert [tuple(state) for state in states] == [(None, 1), (None, 1)]
        assert await mark(first, created) is await mark(second, created + timedelta(days=1)) is False
        lost = await connection.fetchval("SELECT recipient_id FROM mesh.delivery_queue WHERE published_at IS NULL")
        assert lost == first.aggregate


async def test_a_delivery_that_was_settled_stays_so_though_a_new_stream_gives_its_number_away(
    accepting: Accepting,
) -> None:
    await accepting.send(*({"to": f"dm:{member}", "body": "hello"} for member in ("alice", "bob")))
    before = datetime(2026, 1, 1, tzinfo=UTC)
    first, second = await claim_deliveries(accepting)
    async with accepting.pool.acquire() as connection:
        claim = PostgresClaim(deliveries(accepting), connection, (first, second), more=False)
        for message, created in ((first, before), (second, before + timedelta(days=1))):
            place = Place("DEMO_INBOX", created, 1, duplicate=False)
            await claim.settle([(message, place)], [], [])
            await connection.execute(
                "INSERT INTO postroom.work_queue_floors (stream, stream_created_at, filter, pattern, floor) "
                "VALUES ('DEMO_INBOX', $1, 'demo.inbox.*', '^demo[.]inbox[.]alice$', 1) ON CONFLICT DO NOTHING", before,
            )  # fmt: skip
        assert first.subject == "demo.inbox.alice"
        assert await connection.fetchval("SELECT count(*) FROM mesh.delivery_queue WHERE published_at IS NULL") == 0


async def test_a_delivery_whose_number_is_another_messages_is_published_again(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    await accepting.send({"to": "dm:alice", "body": "1"}, {"to": "dm:bob", "body": "2"})
    with worker(**urls(accepting, own_nats)):
        await asyncio.wait_for(accepting.published(), 30)
    record = Record([deliveries(accepting)], RecordSettings())
    link = await Link.open(NatsSettings(url=own_nats.url), name="test", ack_seconds=5)
    assert await record.compare(link) == 0
    await link.js.publish("demo.inbox.bob", b"another's")
    await accepting.pool.execute("UPDATE mesh.delivery_queue SET stream_sequence = 3 WHERE stream_sequence = 2")
    assert await record.compare(link) == 1
    await link.close()


async def test_a_delivery_reads_one_id_though_its_plan_was_made_when_there_were_none(accepting: Accepting) -> None:
    """A kept plan that joins by the mesh alone would read every id of it, for each delivery."""
    fetched = "SELECT idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'client_message_dedupe'"
    wait = timedelta(minutes=1)
    async with accepting.pool.acquire() as connection:
        for count in (1, 100):
            await accepting.send(*({"to": "dm:alice", "body": str(number)} for number in range(count)))
            async with connection.transaction():
                found = await connection.fetch(DELIVERIES.queries["claim_aggregates"], DELIVERIES.lowest, 10, wait)
                mine = [row["aggregate"] for row in found]
                (bounds,) = await connection.fetch(DELIVERIES.queries["horizon"], mine)
                before = await connection.fetchval(fetched)
                rows = await connection.fetch(DELIVERIES.queries["claim"], mine, 500, 2**20, wait, *bounds)
                assert await connection.fetchval(fetched) - before == len(rows)
    assert len(rows) == 1 + 100


def deliveries(accepting: Accepting) -> PostgresSource:
    return PostgresSource(accepting.pool, DELIVERIES, RecordSettings())


async def claim_deliveries(accepting: Accepting) -> Sequence[Outgoing]:
    async with deliveries(accepting).claim(PublisherSettings()) as claim:
        return claim.messages


async def test_a_delivery_that_a_clock_ahead_has_dated_is_claimed_once_that_is_right(accepting: Accepting) -> None:
    (sent,) = await accepting.send({"to": "dm:bob", "body": "hello"})
    query = "UPDATE mesh.delivery_queue SET next_attempt_at = now() + $2::interval WHERE broker_message_id = $1::uuid"
    for ahead, due in ((timedelta(seconds=30), []), (timedelta(days=3650), [sent])):
        await accepting.pool.execute(query, sent, ahead)
        assert [str(message.key).partition(".")[0] for message in await claim_deliveries(accepting)] == due


async def test_a_refused_delivery_is_listed_and_dropped_and_what_waits_behind_it_goes(
    accepting: Accepting, own_nats: EmbeddedNats, short_directory: Path
) -> None:
    refused, behind = await accepting.send({"to": "dm:bob", "body": "a secret"}, {"to": "dm:bob", "body": "behind"})
    await accepting.pool.execute(
        "UPDATE mesh.delivery_queue SET publish_attempts = 3, publish_error = 'too large', "
        "next_attempt_at = 'infinity' WHERE broker_message_id = $1::uuid", refused,
    )  # fmt: skip
    with operated_broker(short_directory, accepting.url) as settings:
        listed = await cli("worker", "deliveries", "list", "--mesh", "demo", "--json", **settings)
        (row,) = map(json.loads, listed.splitlines())
        assert (row["id"].partition(".")[0], row["subject"], row["behind"]) == (refused, "demo.inbox.bob", 1)
        assert "secret" not in listed

        said = await cli("worker", "deliveries", "drop", row["id"], "--reason", "a test", "--yes", **settings)
        assert said == f"{row['id']} dropped\n"
        (noted,) = map(json.loads, (await cli("worker", "deliveries", "log", "--json", **settings)).splitlines())
        assert (noted["id"], noted["aggregate"], noted["error"], noted["reason"]) == (
            row["id"],
            "bob",
            "too large",
            "a test",
        )
        late = ("worker", "deliveries", "drop", row["id"], "--reason", "too late", "--yes")
        again = await asyncio.to_thread(Terminal(**settings).run, *late)
        assert (again.code, f"{row['id']!r} was dropped by administrator on 20" in again.sentence()) == (3, True)
    with worker(**urls(accepting, own_nats)):
        await asyncio.wait_for(accepting.published(), 30)
    assert [json.loads(one.data)["broker_message_id"] for one in await messages_in(own_nats, "DEMO_INBOX")] == [behind]


async def test_a_lost_store_is_made_and_filled_again_and_a_redrive_repeats_by_hand(
    accepting: Accepting, own_nats: EmbeddedNats, short_directory: Path
) -> None:
    await accepting.send(*({"to": "topic:orders", "body": str(n)} for n in range(50)))
    settings = {**urls(accepting, own_nats), "POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.2"}
    with worker(**settings):
        await asyncio.wait_for(accepting.published(), 30)
        client = await nats.connect(own_nats.url)
        js = client.jetstream()
        for name in ("DEMO_EVENTS", "DEMO_INBOX"):
            await js.delete_stream(name)
        await until_so(lambda: holds(js, "DEMO_EVENTS", 50))
        await until_so(lambda: holds(js, "DEMO_INBOX", 100))

        with operated_broker(short_directory, accepting.url) as reach:
            said = await cli("worker", "redrive", "--since", "2000-01-01", "--dry-run", **reach)
            assert said.splitlines() == [
                "events: 50 would be published again",
                "deliveries: 100 would be published again",
                "letters: 0 would be published again",
                "replays: 0 would be published again",
            ]
            assert await cli("worker", "redrive", "--since", "1h", "--dry-run", **reach) == said
            why = ("--reason", "a test", "--yes")
            await cli("worker", "redrive", "--since", "2000-01-01", "--stream", "DEMO_EVENTS", *why, **reach)
            await until_so(lambda: holds(js, "DEMO_EVENTS", 100))
            await asyncio.wait_for(accepting.published(), 30)
            backlog = [json.loads(line) for line in (await cli("worker", "backlog", "--json", **reach)).splitlines()]
        assert backlog == [
            {"source": source, "count": 0, "oldest_at": None, "failing": 0}
            for source in ("events", "deliveries", "letters", "replays")
        ]
        await client.close()


async def test_it_starts_without_nats_says_so_and_publishes_when_it_is_there(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    own_nats.stop()
    await accepting.send({"to": "dm:bob", "body": "hello"})
    with worker(**urls(accepting, own_nats)) as (process, started):
        async with aiohttp.ClientSession(started["page"]) as session:
            async with session.get("/ready") as answer:
                assert (answer.status, "deliveries wait" in await answer.text()) == (503, True)
            async with session.get("/metrics") as answer:
                assert 'postroom_worker_backlog_messages{source="deliveries"} 1.0' in await answer.text()
            own_nats.start()
            await asyncio.wait_for(accepting.published(), 30)
            await until_so(lambda: answers(session, "/ready", 200))
            async with session.get("/metrics") as answer:
                assert 'postroom_worker_published_total{source="deliveries"} 1.0' in await answer.text()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 30) == 0


@pytest.mark.parametrize("before", [False, True], ids=["since before its start", "since"])
async def test_it_stops_while_nats_is_away(accepting: Accepting, own_nats: EmbeddedNats, *, before: bool) -> None:
    if not before:
        own_nats.stop()
    with worker(**urls(accepting, own_nats)) as (process, started):
        async with aiohttp.ClientSession(started["page"]) as session:
            if before:
                await until_so(lambda: answers(session, "/ready", 200))
                own_nats.stop()

            async def it_says_so() -> bool:
                async with session.get("/ready") as answer:
                    return answer.status == 503 and "Connection refused" in await answer.text()

            await until_so(it_says_so)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0


async def test_it_tells_the_service_manager_that_it_is_ready_what_waits_that_it_lives_and_that_it_stops(
    accepting: Accepting, own_nats: EmbeddedNats, short_directory: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_directory / "notify"))
        manager.setblocking(False)
        loop = asyncio.get_running_loop()
        told = {"NOTIFY_SOCKET": str(short_directory / "notify"), "WATCHDOG_USEC": "60000000"}
        with worker(**urls(accepting, own_nats), **told) as (process, _):
            heard = {await loop.sock_recv(manager, 4096) for _ in range(3)}
            process.terminate()
            stopping = await loop.sock_recv(manager, 4096)
            assert await asyncio.to_thread(process.wait, 30) == 0
    assert heard == {b"READY=1", b"STATUS=waiting: events 0, deliveries 0, letters 0, replays 0", b"WATCHDOG=1"}
    assert stopping == b"STOPPING=1"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ('database_url = "postgresql://nowhere"', "nats"),
        ('database_url = "mysql://x"\n[nats]\nurl = "nats://127.0.0.1:1"', "is not a Postgres URL"),
        ('database_url = "{url}"\n[nats]\nurl = "nats://127.0.0.1:1"\n[record]\nkeep_days = 1', "record.keep_days"),
        ('database_url = "{url}"\n[nats]\nurl = "nats://127.0.0.1:1"', "run `postroom broker migrate` first"),
    ],
)
async def test_a_wrong_config_or_schema_ends_it_with_78_and_a_sentence(
    database_url: str, tmp_path: Path, settings: str, said: str
) -> None:
    file = tmp_path / "worker.toml"
    file.write_text(settings.replace("{url}", database_url))
    worker = await Piped.start(["-m", "postroom.worker", "run", "--config", str(file)], os.environ)
    code, told = await worker.communicate()
    assert (code, said in told.decode(), b"Traceback" in told) == (78, True, False), told


async def holds(js: Any, stream: str, messages: int) -> bool:
    try:
        return bool((await js.stream_info(stream)).state.messages == messages)
    except nats.js.errors.NotFoundError:
        return False


async def answers(session: aiohttp.ClientSession, path: str, status: int) -> bool:
    async with session.get(path) as answer:
        return answer.status == status


async def cli(*arguments: str, **environment: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", *arguments, stdout=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], **environment},
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()


async def test_metrics_tell_of_every_durable_consumer_of_the_meshes_also_of_one_that_nobody_runs(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    client = await nats.connect(own_nats.url)
    js = client.jetstream()
    with worker(**urls(accepting, own_nats)) as (_, started):
        await accepting.send({"to": "topic:orders", "body": "one"})
        await asyncio.wait_for(accepting.published(), 30)
        await js.add_stream(name="ELSEWHERE", subjects=["elsewhere.>"])  # of no mesh of this database
        for stream in ("DEMO_EVENTS", "ELSEWHERE"):
            await js.add_consumer(stream, nats.js.api.ConsumerConfig(durable_name="books"))
        await js.pause_consumer("DEMO_EVENTS", "books", "2099-01-01T00:00:00Z")
        labels, text = '{consumer="books",stream="DEMO_EVENTS"}', ""

        async def told() -> bool:  # of at most ten seconds ago
            nonlocal text
            async with aiohttp.ClientSession() as session, session.get(f"{started['page']}/metrics") as answer:
                text = await answer.text()
            return f"postroom_worker_durable_paused{labels} 1.0" in text

        await until_so(told)
    await client.close()
    said = dict(line.split(" ") for line in text.splitlines() if line.startswith("postroom_worker_durable_"))
    books = {f"postroom_worker_durable_{name}{labels}": value for name, value in (
        ("waiting_messages", "1.0"), ("in_hand_messages", "0.0"), ("asking", "0.0"), ("paused", "1.0")
    )}  # fmt: skip
    assert {name: value for name, value in said.items() if name in books} == books
    assert "ELSEWHERE" not in text


async def test_its_metrics_do_not_wait_for_a_nats_that_stands_still(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    client = await nats.connect(own_nats.url)
    await client.jetstream().add_stream(name="DEMO_EVENTS", subjects=["demo.event.>"])
    await client.jetstream().add_consumer("DEMO_EVENTS", nats.js.api.ConsumerConfig(durable_name="books"))
    await client.close()
    with worker(**urls(accepting, own_nats)) as (_, started):

        async def knows_the_consumer() -> bool:
            patience = aiohttp.ClientTimeout(total=_CALL_SECONDS - 1)
            async with aiohttp.ClientSession(timeout=patience) as session:
                return 'consumer="books"' in await (await session.get(f"{started['page']}/metrics")).text()

        await until_so(knows_the_consumer)
        os.kill(own_nats.process.pid, signal.SIGSTOP)
        try:
            await until_so(knows_the_consumer, holds=not_)  # as of at most ten seconds ago
        finally:
            os.kill(own_nats.process.pid, signal.SIGCONT)
        await until_so(knows_the_consumer)


async def test_it_keeps_how_far_behind_each_consumer_is(accepting: Accepting, own_nats: EmbeddedNats) -> None:
    client = await nats.connect(own_nats.url)
    js = client.jetstream()
    await js.add_stream(name="DEMO_EVENTS", subjects=["demo.event.>"])
    for durable in ("books", "idle"):
        subject = "demo.event.orders.v1" if durable == "books" else "demo.event.nothing.v1"
        await js.add_consumer("DEMO_EVENTS", nats.js.api.ConsumerConfig(durable_name=durable, filter_subject=subject))
    await js.publish("demo.event.orders.v1", b"{}")

    async def kept() -> bool:
        rows = await accepting.pool.fetch("SELECT consumer, waiting FROM postroom.minute_waiting")
        assert rows in ([], [("books", 1)])
        return bool(rows)

    with worker(**urls(accepting, own_nats)):
        await until_so(kept)
    await client.close()


async def test_the_largest_body_that_a_broker_accepts_reaches_its_streams(
    accepting: Accepting, own_nats: EmbeddedNats
) -> None:
    await accepting.send({"to": "topic:orders", "body": "\x01" * MAX_BODY_BYTES})
    with worker(**urls(accepting, own_nats)):
        await asyncio.wait_for(accepting.published(), 30)
    (event,) = await messages_in(own_nats, "DEMO_EVENTS")
    assert len(event.data) > 6 * MAX_BODY_BYTES
    assert len(await messages_in(own_nats, "DEMO_INBOX")) == 2


@pytest.mark.parametrize("setting", [{"REPLICAS": "3"}, {"EVENTS_MAX_BYTES": str(10**15)}], ids=["replicas", "room"])
async def test_a_setting_that_nats_refuses_for_a_stream_keeps_no_other_from_being_published_to(
    accepting: Accepting, own_nats: EmbeddedNats, setting: dict[str, str]
) -> None:
    await accepting.send({"to": "topic:orders"})
    with worker(**urls(accepting, own_nats)):
        await asyncio.wait_for(accepting.published(), 30)
    await accepting.pool.execute(QUERIES["create_mesh"], "another")
    await accepting.send({"to": "topic:orders"})
    more_than_there_is = {f"POSTROOM_WORKER_STREAM_DEFAULTS_{name}": value for name, value in setting.items()}
    with worker(**urls(accepting, own_nats), **more_than_there_is):
        await asyncio.wait_for(accepting.published(), 30)


async def test_a_stream_of_the_config_without_room_keeps_no_other_from_being_published_to(
    accepting: Accepting, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    config = tmp_path / "worker.toml"
    huge = f'[[streams]]\nname = "HUGE"\nsubjects = ["huge.event.>"]\nmax_bytes = {10**15}\n'
    config.write_text(f'database_url = "{accepting.url}"\n[nats]\nurl = "{own_nats.url}"\n{huge}')
    await accepting.send({"to": "topic:orders"})
    with worker("--config", str(config)):
        await asyncio.wait_for(accepting.published(), 30)


async def test_a_purged_work_queue_is_filled_again_at_once(accepting: Accepting, own_nats: EmbeddedNats) -> None:
    ids = await accepting.send(*({"to": "queue:work", "body": f"{n}"} for n in range(20)))
    client = await nats.connect(own_nats.url)
    js = client.jetstream()
    slow = {"POSTROOM_WORKER_RECORD_CHECK_SECONDS": "3600"}
    with worker(**urls(accepting, own_nats), **slow):
        await asyncio.wait_for(accepting.published(), 30)
        await js.purge_stream("DEMO_COMMANDS")
        await until_so(lambda: js.stream_info("DEMO_COMMANDS"), holds=lambda info: info.state.messages >= 20)
        found = [await js.get_msg("DEMO_COMMANDS", number) for number in range(21, 41)]
    assert [one.headers["Nats-Msg-Id"] for one in found if one.headers] == [f"{identity}/1" for identity in ids]
    await client.close()
