"""Migrating the broker's schema: numbered files, forward only, each in one transaction under an advisory lock.

Any number of processes may migrate at once: one does it, the others wait and find nothing left to do.
"""

from __future__ import annotations

from broker.database import QUERIES, connect, schema_version
from chassis.exits import Exit, Fatal
from chassis.sql import migrations


async def migrate(url: str) -> list[str]:
    """Bring the database to this program's version and return the names of what was applied, in order.

    Raises `Fatal`: 69 where Postgres can't be reached, 78 where the database is newer than the program.
    """
    connection = await connect(url)
    try:
        known = migrations("broker")
        applied = []
        for version, name, sql in known:
            async with connection.transaction():
                await connection.execute(QUERIES["lock_migrations"])
                found = await schema_version(connection)
                if found > len(known):
                    raise Fatal(
                        Exit.CONFIG,
                        f"the database has schema version {found}, this program knows {len(known)}: upgrade it",
                    )
                if found < version:
                    await connection.execute(sql)
                    await connection.execute(QUERIES["record_migration"], version, name)
                    applied.append(name)
        return applied
    finally:
        await connection.close()
