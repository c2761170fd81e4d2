"""How the broker's commands end where Postgres refuses them (docs/contract/operate.md#operate-14)."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from struct import pack

import asyncpg
import pytest

from broker.__main__ import find_orphans
from broker.database import Database, migrate
from embedded import EmbeddedPostgres
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import connected, fatal_errors
from postroom.delivery.applications import install

PASSWORD = "the-guest's-password"
COMMANDS = (
    ("broker", "run"),
    ("broker", "migrate"),
    ("broker", "orphan-check"),
    ("cli", "broker", "run"),
    ("cli", "broker", "migrate"),
    ("cli", "broker", "orphan-check"),
    ("cli", "broker", "orphan-check", "--json"),
)


@pytest.fixture(scope="module")
def guarded(session_directory: Path) -> Iterator[EmbeddedPostgres]:
    """A Postgres with the migrated database `own`, where the role `guest` has a password and no rights."""
    server = EmbeddedPostgres(session_directory / "guarded", durable=False)
    server.start()
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves the loop of the test plugin alone
        runner.run(_guard(server))
    yield server
    server.stop()


async def _guard(server: EmbeddedPostgres) -> None:
    postgres = await asyncpg.connect(server.url.replace("postroom@", "postgres@"))
    await postgres.execute("CREATE DATABASE own OWNER postroom")
    await postgres.execute(f"""CREATE ROLE guest LOGIN PASSWORD '{PASSWORD.replace("'", "''")}'""")
    await postgres.execute("CREATE ROLE crowd LOGIN CONNECTION LIMIT 0")
    await migrate(server.url_of("own"))
    rules = server.directory / "pg_hba.conf"
    rules.write_text("local all guest scram-sha-256\nlocal all crowd trust\n" + rules.read_text())
    await postgres.execute("SELECT pg_reload_conf()")
    await postgres.close()
    while not await _gets_in(_as(server, "guest", PASSWORD)):  # until the server has read its rules again
        pass


async def _gets_in(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url)
    except asyncpg.InvalidAuthorizationSpecificationError:
        return False
    await connection.close()
    return True


def _as(server: EmbeddedPostgres, role: str, password: str = "") -> str:
    return server.url_of("own").replace("postroom@", f"{role}:{password}@")


REFUSALS = {
    "a wrong password": (Exit.CONFIG, "password authentication failed"),
    "a role that does not exist": (Exit.CONFIG, "stranger"),
    "a database that does not exist": (Exit.CONFIG, '"nowhere" does not exist'),
    "a malformed url": (Exit.CONFIG, "database_url is not a Postgres URL"),
    "a line in the service file": (Exit.CONFIG, "names a service of a file that cannot be read"),
    "a password in the service file": (Exit.CONFIG, "for % write %%"),
    "a role without rights": (Exit.NOT_PERMITTED, "permission denied"),
    "an option of libpq": (Exit.CONFIG, 'option of database_url: .*"connect_timeout"; remove it'),
    "an option of the server": (Exit.CONFIG, 'option of database_url: .*"wal_level".*; remove it'),
    "a role with too many connections": (Exit.TRY_AGAIN, "raise its max_connections or the role's limit"),
    "nobody listening": (Exit.UNAVAILABLE, r"cannot open the database \(database_url\): Connection refused$"),
}


@pytest.fixture(params=REFUSALS)
def refusal(
    request: pytest.FixtureRequest, guarded: EmbeddedPostgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Exit, str]:
    services = tmp_path / "pg_service.conf"
    services.write_text(f"[mail]\npassword{' ' if 'a line' in request.param else '=%'}not-the-password\n")
    monkeypatch.setenv("PGSERVICEFILE", str(services))
    urls = {
        "a wrong password": _as(guarded, "guest", "not-the-password"),
        "a role that does not exist": _as(guarded, "stranger"),
        "a database that does not exist": guarded.url_of("nowhere"),
        "a malformed url": "nonsense:not-the-password",
        "a line in the service file": "postgresql:///own?service=mail",
        "a password in the service file": "postgresql:///own?service=mail",
        "a role without rights": _as(guarded, "guest", PASSWORD),
        "an option of libpq": guarded.url_of("own") + "&connect_timeout=10",
        "an option of the server": guarded.url_of("own") + "&wal_level=minimal",
        "a role with too many connections": _as(guarded, "crowd"),
        "nobody listening": "postgresql://guest:not-the-password@127.0.0.1:1/own",
    }
    return urls[request.param], *REFUSALS[request.param]


async def test_a_refusal_is_one_sentence_and_its_exit_code(refusal: tuple[str, Exit, str]) -> None:
    url, code, words = refusal
    for work in (migrate(url), Database.open(url, connections=1), find_orphans(url, events_kept=timedelta(days=30))):
        with pytest.raises(Fatal, match=words) as refused:
            await work
        assert refused.value.exit_code == code
        assert "\n" not in str(refused.value)
        assert not any(secret in str(refused.value) for secret in ("not-the-password", PASSWORD))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_every_command_says_it_and_ends_with_it(
    guarded: EmbeddedPostgres, config_file: Path, command: tuple[str, ...]
) -> None:
    good = config_file.read_text().splitlines()[1:]
    config_file.write_text("\n".join([f'database_url = "{_as(guarded, "guest", PASSWORD)}"', *good]))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *command, "--config", str(config_file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
    output, said = await process.communicate()

    assert (process.returncode, output) == (Exit.NOT_PERMITTED, b"")
    assert said.decode().count("\n") == 1
    assert b"permission denied" in said
    assert b"Traceback" not in said


async def test_a_database_without_writes_is_worth_another_try(database_url: str) -> None:
    async with connected(database_url + "&default_transaction_read_only=on") as connection:
        with pytest.raises(Fatal, match="takes no writes: name the primary") as refused, fatal_errors():
            await connection.execute("CREATE SCHEMA mail")
    assert refused.value.exit_code == Exit.TRY_AGAIN


async def test_a_pooler_that_gives_each_transaction_another_connection_is_refused(database_url: str) -> None:
    async with connected(database_url) as connection:
        with pytest.raises(Fatal, match=r"a pooler such as PgBouncer .*: name Postgres") as refused, fatal_errors():
            await connection.execute(
                "PREPARE one AS SELECT 1; PREPARE one AS SELECT 1"
            )  # as two programs through it do
    assert refused.value.exit_code == Exit.CONFIG


@pytest.mark.parametrize("theirs", ["SCHEMA mesh", "TABLE postroom.programs ()", "FUNCTION postroom.is_silent"])
async def test_a_database_with_things_of_others_under_our_names_is_refused(database_url: str, theirs: str) -> None:
    async with connected(database_url) as connection:
        body = "(since timestamptz, period interval) RETURNS boolean RETURN true" if "is_silent" in theirs else ""
        await connection.execute(f"CREATE SCHEMA postroom; CREATE {theirs}{body}")
    with pytest.raises(
        Fatal, match=r"things of another program.*: use one of Postroom's own: .* already exists"
    ) as refused:
        await migrate(database_url)
    assert refused.value.exit_code == Exit.CONFIG


async def test_whatever_else_postgres_refuses_is_a_failure(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    with pytest.raises(Fatal, match="the database refused: division by zero") as refused, fatal_errors():
        await connection.execute("SELECT 1 / 0")
    await connection.close()

    assert refused.value.exit_code == Exit.FAILED


async def test_a_server_that_hangs_is_said_to_give_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postroom.chassis.postgres.CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"postgresql://guest@127.0.0.1:{hung.getsockname()[1]}/own"
        with pytest.raises(Fatal, match=r"cannot open the database \(database_url\): no answer in time$") as refused:
            await Database.open(url, connections=1)
    assert refused.value.exit_code == Exit.UNAVAILABLE


async def test_a_server_that_is_too_old_is_refused_before_anything_is_asked_of_it() -> None:
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)  # what asks for TLS
        writer.write(b"N")
        await reader.read(1024)
        version = b"server_version\x0015.18\0"
        welcome = [b"R", pack("!II", 8, 0), b"S", pack("!I", 4 + len(version)), version, b"Z", pack("!I", 5), b"I"]
        writer.write(b"".join(welcome))
        heard.append(await reader.read(1024))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"postgresql://guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/own"
        for work in (migrate(url), Database.open(url, connections=1), install(url, roles=["guest"], meshes=[])):
            with pytest.raises(Fatal, match="this is Postgres 15, and Postroom needs 16 or newer: upgrade") as refused:
                await work
            assert refused.value.exit_code == Exit.CONFIG
    assert {what[:1] for what in heard} == {b"X"}  # the end of a session
