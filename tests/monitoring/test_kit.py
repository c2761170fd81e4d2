"""Each alert fires where what it is for happens, on real programs scraped by a real Prometheus, and else none does."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest
from support.scraped import GENERATOR, PATIENCE, Kit, WebServer
from support.small_disk import on_a_small_disk
from support.waiting import until_so, wait_until

from cli.stack import choose_port
from embedded.processes import tethered
from postroom._wire.sql import load_queries
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(600)]

ALERTS = {row["alert"]: row for row in GENERATOR["table"]("Alerts")}
HOUR = 60.0  # seconds, by rules for which a minute is a second
WHY = ("--reason", "a test")
LARGE = "x" * 400_000 + "\n"
LEAD = load_queries("postroom.worker", "orphans.sql")["lead_checking"]

Provocation = Callable[[Kit], Iterator[None]]  # it provokes, and repairs once the alert has been seen
PROVOCATIONS: dict[Provocation, set[str]] = {}


def provokes(*alerts: str) -> Callable[[Provocation], Provocation]:
    """Note which alerts something has to set off."""

    def note(provocation: Provocation) -> Provocation:
        PROVOCATIONS[provocation] = {f"Postroom{alert}" for alert in alerts}
        return provocation

    return note


@pytest.fixture(scope="module")
def kit(session_directory: Path) -> Iterator[Kit]:
    with Kit(session_directory) as kit:
        yield kit


async def _execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()


def execute(kit: Kit, *statements: str) -> None:
    asyncio.run(_execute(kit.stack.postgres.url, *statements))


@provokes("ProgramDown", "BrokerUnreachable", "OutboxLate")
def stop_the_broker(kit: Kit) -> Iterator[None]:
    kit.stack.broker.stop()
    kit.send("topic:orders")
    yield
    kit.stack.broker.start()


@provokes("RelayPaused")
def pause_the_relay(kit: Kit) -> Iterator[None]:
    kit.postroom("relay", "pause", *WHY)
    yield
    kit.postroom("relay", "resume", *WHY)


@provokes("DeadRows")
def send_to_nowhere(kit: Kit) -> Iterator[None]:
    kit.send("topic:nowhere")
    yield
    kit.postroom("outbox", "abort", "--all", "--status", "dead", *WHY, "--yes")


@provokes("OutboxLogGrows")
def leave_a_reader_open(kit: Kit) -> Iterator[None]:
    reader = sqlite3.connect(kit.stack.layout.outbox_file, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM outbox").fetchall()
    kit.postroom("send", "topic:orders", "-", stdin=LARGE * 200)
    yield
    reader.close()
    kit.postroom("send", "topic:orders", "-", stdin=LARGE * 10)  # the log is emptied with what comes next


@provokes("ClockWrong", "DiskLow", "OutboxFilling", "OutboxFull")
def run_a_daemon_on_a_small_disk(kit: Kit) -> Iterator[None]:
    """A second daemon, on a tmpfs in a mount namespace of its own, whose broker has another time."""
    directory = kit.directory / "small"
    state, path = directory / "state", directory / "d.sock"
    state.mkdir(parents=True)
    token = directory / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-that-nobody-checks")
    port = choose_port()
    with WebServer(0, status=503, ahead=3600) as broker:
        settings = {
            "POSTROOM_DAEMON_MESH": "demo",
            "POSTROOM_DAEMON_SOCKET_PATH": str(path),
            "POSTROOM_DAEMON_STATE_DIRECTORY": str(state),
            "POSTROOM_DAEMON_BROKER_URL": f"http://127.0.0.1:{broker.server_port}",
            "POSTROOM_DAEMON_BROKER_TOKEN_FILE": str(token),
            "POSTROOM_DAEMON_OUTBOX_MAX_BYTES": str(1024 * 1024),
            "POSTROOM_DAEMON_METRICS_LISTEN_PORT": str(port),
        }
        small = on_a_small_disk(state, f'exec "{sys.executable}" -m daemon', megabytes=64)
        with (directory / "daemon.log").open("ab") as log:
            daemon = subprocess.Popen(tethered(small), stderr=log, env=kit.environment | settings)
        with kit.scraping("postroom-daemon", f"127.0.0.1:{port}"):
            for _ in range(30):
                kit.postroom("send", "topic:orders", "x" * 32_000, "--socket", str(path), codes=(0, 75))
            yield
        daemon.terminate()
        daemon.wait()
    shutil.rmtree(directory)


@provokes("MessagesMissing")
def bring_an_older_postgres_back(kit: Kit) -> Iterator[None]:
    data, copy = kit.stack.postgres.data_directory, kit.directory / "older"
    programs = (kit.stack.worker, kit.stack.broker, kit.stack.postgres)

    def stop() -> None:
        kit.consumer.stop()
        for program in programs:
            program.stop()

    def start() -> None:
        for program in reversed(programs):
            program.start()
        kit.consumer.start()

    stop()
    subprocess.run(["cp", "-a", data, copy], check=True)
    start()
    for _ in range(3):
        kit.postroom("send", "topic:orders", "{}", "--wait")
    stop()
    shutil.rmtree(data)
    copy.rename(data)
    kit.stack.postgres.start()
    kit.postroom("broker", "restored", "--config", str(kit.stack.broker.config_file))
    start()
    yield
    kit.postroom("outbox", "resend", "--missing", *WHY, "--yes")


@provokes("PublishingBlocked", "UnpublishedLate", "InboxStopped")
def stop_nats(kit: Kit) -> Iterator[None]:
    kit.stack.nats.stop()
    kit.send("topic:orders")
    yield
    kit.stack.nats.start()


@provokes("PostgresUnreachable")
def stop_postgres(kit: Kit) -> Iterator[None]:
    kit.stack.postgres.stop()
    yield
    kit.stack.postgres.start()


@provokes("RedisUnreachable")
def stop_redis(kit: Kit) -> Iterator[None]:
    assert kit.stack.redis is not None
    kit.stack.redis.stop()
    yield
    kit.stack.redis.start()


@provokes("UnpublishedFail")
def emit_what_nats_has_no_room_for(kit: Kit) -> Iterator[None]:
    large = "jsonb_build_object('text', repeat('x', 9000000))"
    execute(kit, f"SELECT postroom.emit('demo', 'thing', 'one', 'grew', {large})")
    yield
    kit.postroom("worker", "events", "drop", "--all", *WHY, "--yes")


@provokes("StreamLost")
def delete_a_stream(kit: Kit) -> Iterator[None]:
    async def delete() -> None:
        nats = await connect(NatsSettings(url=kit.stack.nats.url), name="test", patience=20)
        js = nats.jetstream()

        async def last() -> int:
            return (await js.stream_info("DEMO_EVENTS")).state.last_seq

        async def published() -> bool:
            return await last() > before

        before = await last()
        kit.send("topic:orders")
        await until_so(published)
        await js.delete_stream("DEMO_EVENTS")
        await nats.close()

    kit.consumer.stop()  # what was handled is not published again
    asyncio.run(delete())
    yield
    kit.consumer.start()


@provokes("Orphans")
def delete_a_part_of_messages(kit: Kit) -> Iterator[None]:
    check = ("broker", "orphan-check", "--config", str(kit.stack.broker.config_file))
    kit.postroom("send", "topic:orders", "{}", "--wait")
    execute(kit, "CREATE TABLE lost AS SELECT * FROM mesh.topic_message", "DELETE FROM mesh.topic_message")
    kit.postroom(*check, codes=(1,))
    kit.stack.worker.stop()
    kit.stack.worker.start()  # it looks what the last check found at its start, and each minute
    yield
    execute(kit, "INSERT INTO mesh.topic_message SELECT * FROM lost", "DROP TABLE lost")
    kit.postroom(*check)
    kit.stack.worker.stop()
    kit.stack.worker.start()


@provokes("OrphanCheckMissed")
def let_another_process_hang_in_the_check(kit: Kit) -> Iterator[None]:
    with asyncio.Runner() as runner:
        another = runner.run(asyncpg.connect(kit.stack.postgres.url))
        kit.stack.worker.stop()
        assert runner.run(another.fetchval(LEAD))
        runner.run(another.execute("UPDATE mesh.orphan_check SET checked_at = checked_at - interval '3 days'"))
        kit.stack.worker.start()
        yield
        runner.run(another.close())
        kit.stack.worker.stop()
        kit.stack.worker.start()


@provokes("ConsumerStopped", "ConsumerBehind")
def stop_a_consumer(kit: Kit) -> Iterator[None]:
    kit.consumer.stop()
    kit.postroom("send", "topic:orders", "-", stdin="one\n" * 1100)
    yield
    kit.consumer.start()


@provokes("ConsumerPaused")
def pause_a_consumer(kit: Kit) -> Iterator[None]:
    kit.postroom("consumer", "pause", "billing", *WHY)
    kit.send("topic:orders")
    yield
    kit.postroom("consumer", "resume", "billing", *WHY)


@provokes("HandlerUnreachable")
def stop_the_handler(kit: Kit) -> Iterator[None]:
    kit.handler.__exit__()
    kit.send("topic:orders")
    yield
    kit.handler = WebServer(kit.handler.server_port)


@provokes("AttemptsWait")
def let_the_handler_fail(kit: Kit) -> Iterator[None]:
    kit.handler.status = 404  # which uses up no attempt for long
    kit.send("topic:orders")
    yield
    kit.handler.status = 204


@provokes("DeadLetters")
def let_the_handler_refuse(kit: Kit) -> Iterator[None]:
    kit.handler.status = 422
    kit.send("topic:orders")
    yield
    kit.handler.status = 204


@provokes("JobsFailed")
def start_a_job_that_fails(kit: Kit) -> Iterator[None]:
    kit.postroom("jobs", "start", "failing_flow:flow", "--mesh", "demo", "--request", "{}")
    yield


def test_nothing_fires_in_a_quiet_hour_and_every_panel_has_data(kit: Kit) -> None:
    began = time.monotonic()
    while time.monotonic() < began + HOUR:
        kit.postroom("send", "topic:orders", "one", "--wait")
        kit.postroom("send", "queue:counter", "one")
        time.sleep(0.5)
    assert kit.series(f'count_over_time(ALERTS{{alertstate="firing"}}[{HOUR + 10:.0f}s])') == []
    for row in GENERATOR["table"]("Dashboard"):
        assert kit.series(row["query"]), row


@pytest.mark.parametrize("provocation", PROVOCATIONS, ids=lambda each: each.__name__)
def test_alerts_fire(kit: Kit, provocation: Provocation) -> None:
    wanted = PROVOCATIONS[provocation]
    wait_until(lambda: not wanted & kit.firing(), f"{wanted} do not fire yet", seconds=PATIENCE)
    steps = provocation(kit)
    next(steps)
    try:
        wait_until(lambda: wanted <= kit.firing(), f"{wanted} fire", seconds=PATIENCE)
        for alert in wanted:
            program, *words = ALERTS[alert]["first command"].split()
            if program == "postroom":
                installed, ours = "/etc/postroom/broker.toml", str(kit.stack.broker.config_file)
                kit.postroom(*(ours if word == installed else word for word in words), codes=(0, 1, 69))
    finally:
        next(steps, None)
    wait_until(lambda: not wanted & kit.firing(), f"{wanted} fire no more", seconds=PATIENCE)


def test_every_alert_is_provoked() -> None:
    assert set().union(*PROVOCATIONS.values()) == ALERTS.keys()
