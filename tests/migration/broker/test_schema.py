"""`schema.sql` is what the migrations leave, catalog for catalog (house.md, habit 5)."""

from __future__ import annotations

import asyncpg

from broker.migrate import migrate
from chassis.sql import read_sql

CATALOG = """
SELECT 'column', table_schema || '.' || table_name || '.' || column_name,
  concat_ws(' ', ordinal_position, data_type, is_nullable, column_default, is_identity, collation_name)
FROM information_schema.columns WHERE table_schema IN ('mesh', 'postroom')
UNION ALL SELECT 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace IN ('mesh'::regnamespace, 'postroom'::regnamespace)
UNION ALL SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
FROM pg_index JOIN pg_class ON pg_class.oid = indrelid
WHERE relnamespace IN ('mesh'::regnamespace, 'postroom'::regnamespace)
UNION ALL SELECT 'trigger', tgrelid::regclass || '.' || tgname, pg_get_triggerdef(oid)
FROM pg_trigger WHERE NOT tgisinternal
UNION ALL SELECT 'function', oid::regprocedure::text, pg_get_functiondef(oid)
FROM pg_proc WHERE pronamespace IN ('mesh'::regnamespace, 'postroom'::regnamespace)
UNION ALL SELECT 'relation', oid::regclass::text,
  concat_ws(' ', relkind, reloptions, CASE relkind WHEN 'v' THEN pg_get_viewdef(oid) END)
FROM pg_class WHERE relnamespace IN ('mesh'::regnamespace, 'postroom'::regnamespace)
ORDER BY 1, 2, 3
"""


async def test_the_schema_file_and_the_migrations_make_the_same_database(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    await migrate(database_url)
    by_migrations = await connection.fetch(CATALOG)
    await connection.execute("DROP SCHEMA mesh CASCADE; DROP SCHEMA postroom CASCADE")
    await connection.execute(read_sql("broker", "schema.sql"))
    by_schema = await connection.fetch(CATALOG)
    await connection.close()

    assert len(by_migrations) > 100
    assert by_schema == by_migrations
