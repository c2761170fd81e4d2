"""`schema.sql` is what the migrations leave, in a database that has nothing but delivering."""

from __future__ import annotations

from support.catalog import catalog, rebuild

from postroom.chassis.sql import read_sql
from postroom.delivery.database import migrate


async def test_the_schema_file_and_the_migrations_make_the_same_database(database_url: str) -> None:
    await migrate(database_url)
    by_migrations = await catalog(database_url, "postroom")
    await rebuild(database_url, read_sql("postroom.delivery", "schema.sql"))

    assert len(by_migrations) > 30
    assert await catalog(database_url, "postroom") == by_migrations
