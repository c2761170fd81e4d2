"""Databases of tests: migrated ones, which a session or a test has, and ones that come back older than they were.

One that a session shares is much quicker than a new one. Copies are those that Postgres itself makes of a database that
nobody uses.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg

from embedded import EmbeddedPostgres
from embedded.processes import processes_in

# Lets every accept stand still, in the transaction of a test, where it is about to take its numbers.
HOLD_NUMBERS = "SELECT pg_advisory_xact_lock(hashtext('postroom.history.numbers'), id) FROM mesh.mesh"

# Ends every session of the database but one's own, also those that are beginning: they have its settings of before
# already, and are in no other list until they have begun.
END_SESSIONS = """
WITH beginning AS MATERIALIZED (
  SELECT pid FROM pg_locks JOIN pg_database ON objid = pg_database.oid
  WHERE locktype = 'object' AND classid = 'pg_database'::regclass AND mode = 'RowExclusiveLock' AND datname = '{name}'
)
SELECT pg_terminate_backend(pid) FROM (
  SELECT pid FROM beginning
  UNION ALL SELECT pid FROM pg_stat_activity WHERE datname = '{name}' AND backend_type = 'client backend'
) AS session
WHERE pid <> pg_backend_pid()
"""

END_SESSION = """
CREATE SEQUENCE public.ended_sessions;
CREATE FUNCTION public.end_session() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF nextval('public.ended_sessions') = 1 THEN  -- which no rollback takes back
    PERFORM pg_terminate_backend(pg_backend_pid());
  END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER end_session BEFORE INSERT ON mesh.operator_log
  FOR EACH ROW WHEN (NEW.key = '{key}') EXECUTE FUNCTION public.end_session();
"""
ENDED = "DROP FUNCTION public.end_session CASCADE; DROP SEQUENCE public.ended_sessions"


def migrated_database(server: EmbeddedPostgres, name: str, migrate: Callable[[str], Awaitable[object]]) -> str:
    """Make the database `name` in a fixture of the session, migrated; returns its address."""
    url = server.url_of(name)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves the loop of the test plugin alone
        runner.run(_create(server, name, migrate))
    return url


@asynccontextmanager
async def postgres_of_its_own(
    directory: Path, migrate: Callable[[str], Awaitable[object]], *, durable: bool = False
) -> AsyncIterator[EmbeddedPostgres]:
    """Run a Postgres that a test may stop, or kill where it is durable, with the migrated database `own`."""
    server = EmbeddedPostgres(directory / "postgres", durable=durable)
    server.start()
    await _create(server, "own", migrate)
    yield server
    server.stop()


async def _create(server: EmbeddedPostgres, name: str, migrate: Callable[[str], Awaitable[object]]) -> None:
    await create(server, name)
    await migrate(server.url_of(name))


@contextmanager
def frozen(server: EmbeddedPostgres) -> Iterator[None]:
    """Stop all processes of a server for the length of the block: it takes connections, and answers nothing."""
    stopped = list(processes_in(server.data_directory))
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def ending_session(url: str, key: str) -> Iterator[None]:
    """Let Postgres end the session, once, in which the operator log of `url` gets a line of the key."""

    def run(statement: str) -> None:
        async def work() -> None:
            connection = await asyncpg.connect(url)
            await connection.execute(statement)
            await connection.close()

        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            runner.run(work())

    run(END_SESSION.format(key=key))
    try:
        yield
    finally:
        run(ENDED)


async def create(server: EmbeddedPostgres, name: str, template: str = "template1") -> None:
    """Make a database, empty or as `template` is, which nobody may be connected to.

    Its files are copied. By default Postgres writes each page to its log as well, which is twice the work.
    """
    await execute(server, f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')


async def drop(server: EmbeddedPostgres, name: str) -> None:
    """Drop a database; whoever is connected to it is not any more."""
    await execute(server, f'DROP DATABASE "{name}" WITH (FORCE)')


async def back_up(server: EmbeddedPostgres, database: str) -> None:
    """Keep `database` as it is now; nobody may be connected to it."""
    await create(server, f"{database}_backup", database)


async def restore(server: EmbeddedPostgres, database: str) -> None:
    """Put it back; whoever is connected to it is not any more."""
    await drop(server, database)
    await create(server, database, f"{database}_backup")


async def forget(server: EmbeddedPostgres, database: str) -> None:
    """Throw what was kept away."""
    await execute(server, f'DROP DATABASE IF EXISTS "{database}_backup"')


def begin_timeline(server: EmbeddedPostgres) -> None:
    """Let a stopped server recover from its own log at its start, as a promoted standby does: on a new timeline."""
    data = server.data_directory
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write("restore_command = 'false'\n")
    recovery = data / "recovery.signal"
    recovery.touch()
    owner = data.stat()
    os.chown(recovery, owner.st_uid, owner.st_gid)


async def execute(server: EmbeddedPostgres, statement: str) -> None:
    """Execute a statement in no particular database of a server."""
    connection = await asyncpg.connect(server.url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
