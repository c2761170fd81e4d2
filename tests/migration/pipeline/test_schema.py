"""`schema.sql` is what the migrations leave, catalog for catalog."""

from __future__ import annotations

from support.catalog import catalog, rebuild

from pipeline.tables import migrate
from postroom.chassis.sql import read_sql


async def test_the_schema_file_and_the_migrations_make_the_same_database(database_url: str) -> None:
    applied = await migrate(database_url)
    by_migrations = await catalog(database_url, "pipeline")
    await rebuild(database_url, read_sql("pipeline", "schema.sql"))

    assert applied == ["pipeline/0001_pipeline"]
    assert len(by_migrations) > 15
    assert await catalog(database_url, "pipeline") == by_migrations
