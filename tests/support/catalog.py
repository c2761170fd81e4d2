"""What a Postgres database consists of, as its catalog tells it: for comparing what two scripts make."""

from __future__ import annotations

import asyncpg

from postroom.chassis.sql import load_queries

_PREPARE = load_queries("postroom.chassis", "migrations.sql")["prepare_migrations"]

_CATALOG = """
SELECT 'column', table_schema || '.' || table_name || '.' || column_name,
  concat_ws(' ', ordinal_position, data_type, is_nullable, column_default, is_identity, collation_name)
FROM information_schema.columns WHERE table_schema = ANY ($1)
UNION ALL SELECT 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
FROM pg_constraint WHERE connamespace = ANY ($1::text[]::regnamespace[])
UNION ALL SELECT 'index', indexrelid::regclass::text, pg_get_indexdef(indexrelid)
FROM pg_index JOIN pg_class ON pg_class.oid = indrelid
WHERE relnamespace = ANY ($1::text[]::regnamespace[])
UNION ALL SELECT 'trigger', tgrelid::regclass || '.' || tgname, pg_get_triggerdef(pg_trigger.oid)
FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
WHERE NOT tgisinternal AND relnamespace = ANY ($1::text[]::regnamespace[])
UNION ALL SELECT 'function', oid::regprocedure::text, pg_get_functiondef(oid)
FROM pg_proc WHERE pronamespace = ANY ($1::text[]::regnamespace[])
UNION ALL SELECT 'relation', oid::regclass::text,
  concat_ws(' ', relkind, reloptions, CASE relkind WHEN 'v' THEN pg_get_viewdef(oid) END)
FROM pg_class WHERE relnamespace = ANY ($1::text[]::regnamespace[])
ORDER BY 1, 2, 3
"""


async def catalog(database_url: str, *schemas: str) -> list[tuple[str, str, str]]:
    """List the columns, constraints, indexes, triggers, functions and relations of some schemas."""
    connection = await asyncpg.connect(database_url)
    rows = await connection.fetch(_CATALOG, list(schemas))
    await connection.close()
    return [tuple(row) for row in rows]


async def rebuild(database_url: str, *scripts: str) -> None:
    """Drop what Postroom made, and run these scripts where the migrations would run."""
    connection = await asyncpg.connect(database_url)
    await connection.execute("DROP SCHEMA IF EXISTS mesh, ledger, pipeline CASCADE; DROP SCHEMA postroom CASCADE")
    for script in (_PREPARE, *scripts):
        await connection.execute(script)
    await connection.close()
