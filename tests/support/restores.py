"""Databases that come back older than they were: as copies that Postgres itself makes of one that nobody uses."""

from __future__ import annotations

import os

import asyncpg

from embedded import EmbeddedPostgres


async def back_up(server: EmbeddedPostgres, database: str) -> None:
    """Keep `database` as it is now; nobody may be connected to it."""
    await _execute(server, f'CREATE DATABASE "{database}_backup" TEMPLATE "{database}"')


async def restore(server: EmbeddedPostgres, database: str) -> None:
    """Put it back; whoever is connected to it is not any more."""
    await _execute(
        server, f'DROP DATABASE "{database}" WITH (FORCE)', f'CREATE DATABASE "{database}" TEMPLATE "{database}_backup"'
    )


async def forget(server: EmbeddedPostgres, database: str) -> None:
    """Throw what was kept away."""
    await _execute(server, f'DROP DATABASE IF EXISTS "{database}_backup"')


def begin_timeline(server: EmbeddedPostgres) -> None:
    """Let a stopped server recover from its own log at its start, as a promoted standby does: on a new timeline."""
    data = server.data_directory
    with (data / "postgresql.auto.conf").open("a") as settings:
        settings.write("restore_command = 'false'\n")
    signal = data / "recovery.signal"
    signal.touch()
    owner = data.stat()
    os.chown(signal, owner.st_uid, owner.st_gid)


async def _execute(server: EmbeddedPostgres, *statements: str) -> None:
    connection = await asyncpg.connect(server.url)
    for statement in statements:
        await connection.execute(statement)
    await connection.close()
