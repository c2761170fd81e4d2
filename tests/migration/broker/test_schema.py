"""`schema.sql` is what the migrations leave, catalog for catalog."""

from __future__ import annotations

from support.catalog import catalog, rebuild

from broker.database import migrate
from postroom.chassis.sql import read_sql


async def test_the_schema_files_and_the_migrations_make_the_same_database(database_url: str) -> None:
    await migrate(database_url)
    by_migrations = await catalog(database_url, "mesh", "postroom")
    await rebuild(database_url, read_sql("postroom.delivery", "schema.sql"), read_sql("broker", "schema.sql"))

    assert len(by_migrations) > 100
    assert await catalog(database_url, "mesh", "postroom") == by_migrations
