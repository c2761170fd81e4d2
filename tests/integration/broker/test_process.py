"""The broker as a process: start, notify, stop, and every reason not to start (docs/contract/operate.md#operate-3)."""

from __future__ import annotations

import asyncio
import grp
import json
import os
import re
import socket
import ssl
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import pytest
from support.certificates import CERTIFICATE, KEY, LOCKED_KEY, private
from support.databases import HOLD_NUMBERS
from support.zygote import Piped

from broker.config import BrokerConfig
from broker.database import Database, migrate
from broker.server import open_services, serving
from embedded import EmbeddedPostgres
from postroom.chassis.exits import Exit, Fatal

Message = Callable[..., dict[str, Any]]

DOCS = Path(__file__).parents[3] / "docs"


async def run(command: str, file: Path, **environ: str) -> tuple[int, str]:
    """Run one command of the broker to its end; its exit code and what it said."""
    process = await Piped.start(["-m", "broker", command, "--config", str(file)], environ)
    code, output = await process.communicate()
    return code, output.decode()


@pytest.fixture
def rewrite(config_file: Path) -> Callable[[str], Path]:
    """How to write the config file anew, with this line instead of the one (or beside those) that it had."""
    good = config_file.read_text().splitlines()

    def write(line: str) -> Path:
        kept = [old for old in good if not old.startswith(line.partition("=")[0])]
        config_file.write_text("\n".join([*kept, line] if line.startswith("[") else [line, *kept]))
        return config_file

    return write


@pytest.fixture
def bad_tokens(tmp_path: Path) -> dict[str, Path]:
    short, open_to_all = tmp_path / "short", tmp_path / "open"
    short.write_text("short")
    short.chmod(0o600)
    open_to_all.write_text("a token that everybody can read")
    open_to_all.chmod(0o644)
    for name, text in (("marked", f"\ufeff{'x' * 30}\n"), ("two", f"{'x' * 30}\n{'y' * 30}\n"), ("long", "x" * 513)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return {"short": short, "open": open_to_all, **{name: tmp_path / name for name in ("marked", "two", "long")}}


async def test_it_stops_on_sigterm_and_finishes_the_batch_at_work(
    broker: Any, broker_process: Any, message: Message, postgres: Any, waiting_for_lock: Any
) -> None:
    async with postgres.transaction():
        await postgres.execute(HOLD_NUMBERS)
        alice = broker.member("alice").at(broker_process.url)
        post = asyncio.create_task(alice.send_one(message("id-1")))
        await waiting_for_lock(1)
        broker_process.process.terminate()

    assert (await post).status == 201
    assert await asyncio.to_thread(broker_process.process.wait, 30) == 0


async def test_it_stops_on_sigterm_though_postgres_does_not_answer_any_more(
    rewrite: Any, postgres_server: EmbeddedPostgres, short_directory: Path, postgres: Any, waiting_for_lock: Any
) -> None:
    answers = asyncio.Event()
    answers.set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await answers.wait()
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = postgres_server.socket_directory / ".s.PGSQL.5432"
        far_reader, far_writer = await asyncio.open_unix_connection(there)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    database = (await postgres.fetchval("SELECT current_database()"), short_directory)
    config = rewrite('database_url = "postgresql://postroom@/{}?host={}"'.format(*database))
    async with await asyncio.start_unix_server(serve, short_directory / ".s.PGSQL.5432"), postgres.transaction():
        await postgres.execute("LOCK TABLE mesh.client_message_dedupe IN ACCESS EXCLUSIVE MODE")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "broker", "--config", str(config)), stderr=asyncio.subprocess.DEVNULL
        )
        await waiting_for_lock(1)  # the sweeper's: a loop that goes on after most errors
        answers.clear()
        process.terminate()
        try:
            async with asyncio.timeout(30):
                assert await process.wait() == 0
        finally:
            answers.set()  # what still waits for one ends
            with suppress(ProcessLookupError):
                process.kill()


async def test_it_tells_the_service_manager_that_it_is_ready_that_it_lives_and_that_it_stops(
    config_file: Path, short_directory: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_directory / "notify"))
        manager.setblocking(False)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "broker", "--config", str(config_file)),
            stderr=asyncio.subprocess.DEVNULL,
            env={"NOTIFY_SOCKET": str(short_directory / "notify"), "WATCHDOG_USEC": "20000"},
        )
        loop = asyncio.get_running_loop()
        ready = await loop.sock_recv(manager, 4096)
        answers = [await loop.sock_recv(manager, 4096) for _ in range(3)]
        process.terminate()
        while (stopping := await loop.sock_recv(manager, 4096)) == b"WATCHDOG=1":
            pass

    assert answers == [b"WATCHDOG=1"] * 3
    assert ready.startswith(b"READY=1\nSTATUS=accepting on http://127.0.0.1:")
    assert (stopping, await process.wait()) == (b"STOPPING=1", 0)


@pytest.mark.parametrize(("host", "warns"), [("0.0.0.0", True), ("127.0.0.1", False)])  # noqa: S104 - nobody calls it
async def test_tokens_that_would_cross_the_network_unencrypted_are_warned_of(
    rewrite: Any, host: str, *, warns: bool
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "broker", "--config", str(rewrite(f'listen_host = "{host}"'))),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    first = await process.stderr.readline()
    process.terminate()
    lines = [json.loads(line) for line in (first + (await process.communicate())[1]).splitlines()]
    warnings = {line["event"]: line.get("advice", "") for line in lines if line["level"] == "warning"}
    assert ("set tls_cert and tls_key" in warnings.get("tokens_unencrypted", "")) is warns


async def test_it_does_not_start_on_a_schema_that_is_older(rewrite: Any, database_url: str) -> None:
    code, said = await run("run", rewrite(f'database_url = "{database_url}"'))

    assert (code, "postroom broker migrate" in said, "Traceback" in said) == (78, True, False)


@pytest.mark.parametrize("version", [3, 1001], ids=["by two minor versions", "by a major version"])
async def test_nothing_starts_on_a_schema_that_is_newer(rewrite: Any, database_url: str, version: int) -> None:
    file = rewrite(f'database_url = "{database_url}"')
    code, said = await run("migrate", file)
    assert (code, "applied broker/0001_accept" in said) == (0, True)
    await pretend(database_url, version)

    code, said = await run("run", file)
    assert (code, f"version {version} of the broker schema" in said, "Traceback" in said) == (78, True, False)
    with pytest.raises(Fatal, match=f"version {version}.*supports 1, 2: upgrade the program") as refused:
        await migrate(database_url)
    assert refused.value.exit_code == Exit.CONFIG


async def test_a_schema_that_is_one_minor_version_newer_is_used_and_left_alone(database_url: str) -> None:
    await migrate(database_url)
    await pretend(database_url, 2)

    await (await Database.open(database_url, connections=1)).close()
    assert await migrate(database_url) == []


async def pretend(database_url: str, version: int) -> None:
    """Let the broker's tables have a version."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "INSERT INTO postroom.schema_migration (room, version, name) VALUES ('broker', $1, 'from the future')", version
    )
    await connection.close()


async def test_any_number_of_processes_may_migrate_at_once(database_url: str) -> None:
    applied = await asyncio.gather(*(migrate(database_url) for _ in range(5)))

    steps = [step for one in applied for step in one]
    assert len(steps) >= 2
    assert len(set(steps)) == len(steps)
    assert await migrate(database_url) == []


async def test_a_wrong_config_ends_it_with_78_and_a_sentence(rewrite: Any, config: BrokerConfig) -> None:
    code, said = await run("run", rewrite("[limiter]\nper_mesh = 0"))

    assert (code, "limiter.per_mesh" in said, "Traceback" in said) == (78, True, False)
    assert config.database_url not in said


async def test_what_cannot_be_opened_is_named(
    migrated: BrokerConfig, bad_tokens: dict[str, Path], tmp_path: Path
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe", 0o600)
    (open_key := private(KEY, tmp_path)).chmod(0o604)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"admin_token_file": bad_tokens["short"]}, "fewer than 20"),
        ({"admin_token_file": bad_tokens["open"]}, "every user can open admin_token_file"),
        *(({"admin_token_file": bad_tokens[name]}, "that a request can carry") for name in ("marked", "two", "long")),
        ({"admin_token_file": Path("/nowhere")}, "/nowhere"),
        ({"admin_token_file": pipe}, "admin_token_file .*not a regular file"),
        ({"tls_cert": pipe, "tls_key": pipe}, "tls_cert .*not a regular file"),
        ({"database_url": "nonsense"}, "database_url is not a Postgres URL"),
        ({"redis_url": "nonsense"}, "redis_url is not a Redis URL"),
        ({"redis_url": "redis://localhost/0?ssl_cert_reqs=none"}, "redis_url is not a Redis URL"),
        ({"redis_url": "redis://localhost/0?pasword=x"}, "redis_url is not a Redis URL"),
        ({"redis_url": "rediss://localhost/0?ssl_cert_reqs=sometimes"}, "redis_url is not a Redis URL"),
        ({"tls_cert": Path("/nowhere"), "tls_key": KEY}, "tls_cert /nowhere"),
        ({"tls_cert": CERTIFICATE, "tls_key": open_key}, "tls_key .*open to every user"),
        ({"tls_cert": CERTIFICATE, "tls_key": private(LOCKED_KEY, tmp_path)}, "tls_key .*has a passphrase"),
    ]
    for changes, sentence in wrong:
        with pytest.raises(Fatal, match=sentence) as refused:
            async with open_services(msgspec.structs.replace(migrated, **changes)) as services, serving(services):
                pass
        assert refused.value.exit_code == Exit.CONFIG


async def test_it_speaks_tls_with_the_certificate_it_is_given(migrated: BrokerConfig, tmp_path: Path) -> None:
    tls = msgspec.structs.replace(migrated, tls_cert=CERTIFICATE, tls_key=private(KEY, tmp_path))
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    async with (
        open_services(tls) as services,
        serving(services) as url,
        aiohttp.ClientSession() as session,
        session.get(f"{url}/ready", ssl=trust) as answer,
    ):
        assert (url.partition(":")[0], answer.status) == ("https", 200)


async def test_it_listens_on_a_unix_socket_and_replaces_a_stale_one(
    migrated: BrokerConfig, short_directory: Path
) -> None:
    path = short_directory / "broker.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    connector = aiohttp.UnixConnector(str(path))
    async with (
        open_services(msgspec.structs.replace(migrated, socket_path=path)) as services,
        serving(services),
        aiohttp.ClientSession(connector=connector) as session,
        session.get("http://broker/ready") as answer,
    ):
        assert answer.status == 200


@pytest.mark.parametrize(("grouped", "mode"), [(False, 0o600), (True, 0o660)])
async def test_its_sockets_mode_is_there_at_once_whatever_the_umask(
    migrated: BrokerConfig, short_directory: Path, *, grouped: bool, mode: int
) -> None:
    path = short_directory / "broker.sock"
    group = grp.getgrgid(os.getgid()).gr_name if grouped else None
    config = msgspec.structs.replace(migrated, socket_path=path, socket_group=group)
    before = os.umask(0o000)
    try:
        async with open_services(config) as services, serving(services):
            found = path.stat()
    finally:
        os.umask(before)
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (mode, os.getgid())
    assert not path.exists()


async def test_a_second_broker_leaves_a_live_socket_alone(migrated: BrokerConfig, short_directory: Path) -> None:
    path = short_directory / "broker.sock"
    async with open_services(msgspec.structs.replace(migrated, socket_path=path)) as services, serving(services):
        inode = path.stat().st_ino
        with pytest.raises(Fatal, match="already running") as refused:
            async with serving(services):
                pass
        assert (refused.value.exit_code, path.stat().st_ino) == (Exit.UNAVAILABLE, inode)


async def test_a_postgres_that_cannot_be_reached_is_69_and_its_password_stays_secret(rewrite: Any) -> None:
    code, said = await run("run", rewrite('database_url = "postgresql://user:secret@127.0.0.1:1/x"'))

    assert (code, "secret" in said, "Traceback" in said) == (69, False, False)


async def test_an_address_that_is_taken_is_69(rewrite: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, said = await run("run", rewrite(f"listen_port = {taken.getsockname()[1]}"))

    assert (code, "cannot listen on 127.0.0.1:" in said) == (69, True)


async def test_the_openapi_document_has_every_route_and_the_health_routes_answer(broker: Any) -> None:
    document = (await broker.nobody.get("/openapi.json")).body

    assert document["openapi"] == "3.1.0"
    assert "AcceptBatch" in json.dumps(document["paths"]["/v1/accept"])
    for path, operations in document["paths"].items():  # each refuses a query string that it does not take
        assert all("400" in operation["responses"] for operation in operations.values()), path
    assert document == json.loads((DOCS / "openapi/broker.json").read_text()), "run `make docs`"
    assert (await broker.nobody.get("/health")).body == {"status": "ok", "reasons": []}
    assert (await broker.nobody.get("/ready")).body == {"status": "ok", "reasons": []}


async def test_metrics_count_every_phase_and_name_nobody(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    await alice.send(message("id-1"), message("id-1"), message("id-2", "topic:nothing"), {})
    text = (await broker.nobody.get("/metrics")).body

    for phase, status in (("b3", 201), ("b0", 200), ("b2", 404), ("b1", 400)):
        assert f'postroom_broker_messages_total{{phase="{phase}",status="{status}"}} 1.0' in text
    assert "postroom_broker_rate_limit_consumed_then_rejected_total 1.0" in text
    assert not any(secret in text for secret in ("alice", "demo", "id-1", alice.token))
    named = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert named <= set(re.findall(r"^\| `(\w+)`", (DOCS / "metrics.md").read_text(), re.MULTILINE))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("limit", ["max_in_flight", "buffered_bytes"])
async def test_a_crowd_waits_and_is_asked_to_come_again_where_that_takes_too_long(
    broker: Any, message: Message, start_broker: Any, postgres: Any, *, waiting_for_lock: Any, limit: str
) -> None:
    tight = msgspec.structs.replace(broker.services.config, **{limit: 1})
    async with start_broker(tight) as other:
        alice = broker.member("alice").at(other.url)
        async with postgres.transaction():
            await postgres.execute(HOLD_NUMBERS)
            post = asyncio.create_task(alice.send_one(message("id-1")))
            await waiting_for_lock(1)
            turned_away = await alice.post("/v1/accept", {"messages": [message("id-2")]})

        assert (turned_away.status, turned_away.code) == (503, "overloaded")
        assert turned_away.headers["Retry-After"] == "1"
        assert (await post).status == 201
        assert (await alice.send_one(message("id-2"))).status == 201


async def test_a_body_that_never_comes_ends_in_408(broker: Any, start_broker: Any) -> None:
    hasty = msgspec.structs.replace(broker.services.config, body_seconds=0.01)
    async with start_broker(hasty) as other:
        host, port = other.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        token = broker.tokens["demo", "alice"]
        head = f"POST /v1/accept HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 10\r\n\r\n"
        writer.write(head.encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
