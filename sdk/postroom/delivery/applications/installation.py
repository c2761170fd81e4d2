"""The installation in an application's own Postgres: schema, grants, meshes. A second one changes nothing.

Everything that it makes is in the schemas `postroom` and `postroom_once`; it touches nothing else of the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from postroom import delivery
from postroom._wire.sql import load_queries
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import Connection, Pool, check_version, close_pool, connected, migrate, open_pool
from postroom.delivery.applications import ROOM, ROOMS
from postroom.errors import PostroomError
from postroom.once.postgres import PostgresStore

QUERIES: Final = load_queries(__package__)
_OLDEST: Final = 16  # the major version of Postgres from which on all that is used is there


class Installed(NamedTuple):
    """What an installation changed (`applied`, by migration), who may emit now, and to which meshes at least."""

    applied: list[str]
    roles: list[str]
    meshes: list[str]


async def install(url: str, *, roles: Sequence[str] = (), meshes: Sequence[str] = ()) -> Installed:
    """Make the tables in the database at `url`, or bring them up to date, and let `roles` emit.

    `meshes` are those that may be emitted to until a worker knows more. Raises `Fatal`: 69 where Postgres can't be
    reached, 77 where the role of `url` may not do it, 78 where the database, a role or a mesh cannot be used.
    """
    async with connected(url) as connection:
        has_broker = await _check(connection, roles)
        if meshes and has_broker:
            sentence = "this is a broker's database, which knows its meshes: omit --mesh"
            raise Fatal(Exit.USAGE, sentence)
    applied = await migrate(url, *((ROOM,) if has_broker else ROOMS))
    pool = await open_pool(url, name="postroom-install", connections=1)
    try:
        await PostgresStore(pool).prepare()
    except PostroomError as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    finally:
        await close_pool(pool)
    async with connected(url) as connection, connection.transaction():
        for role in roles:
            await connection.execute(await connection.fetchval(QUERIES["write_grants"], role))
        await connection.execute(QUERIES["add_meshes"], list(meshes))
    return Installed(applied, list(roles), list(meshes))


async def know_meshes(pool: Pool, meshes: Sequence[str]) -> None:
    """Have `meshes` be those that may be emitted to, and no other; none: any."""
    await pool.execute(QUERIES["know_meshes"], meshes)


async def _check(connection: Connection, roles: Sequence[str]) -> bool:
    """Return whether a broker's tables are there; raises `Fatal` (78) where nothing can be installed."""
    version = connection.get_server_version()
    if version.major < _OLDEST:
        sentence = f"this is Postgres {version.major}, and the outbox needs {_OLDEST} or newer: upgrade the server"
        raise Fatal(Exit.CONFIG, sentence)
    if await connection.fetchval(QUERIES["foreign_schema"]):
        sentence = "the schema postroom of this database is not ours: rename it (ALTER SCHEMA postroom RENAME TO …)"
        raise Fatal(Exit.CONFIG, sentence)
    for role in roles:
        if not await connection.fetchval(QUERIES["role_exists"], role):
            raise Fatal(Exit.CONFIG, f"there is no role {role} in this Postgres: create it first (CREATE ROLE)")
    has_broker: bool = await connection.fetchval(QUERIES["has_broker"])
    if has_broker:
        await check_version(connection, delivery.ROOM, migrate_with="postroom broker migrate")
    return has_broker
