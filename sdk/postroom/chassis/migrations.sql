-- name: prepare_migrations
-- The schema that every room's tables may share, and the table that remembers what was applied.
CREATE SCHEMA IF NOT EXISTS postroom;
CREATE TABLE IF NOT EXISTS postroom.schema_migration (
  room text NOT NULL,
  version integer NOT NULL,
  name text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (room, version)
);

-- name: lock_migrations
-- One migration at a time, however many processes start at once; released with the transaction.
SELECT pg_advisory_xact_lock(hashtext('postroom.migrate'));

-- name: wait_briefly
-- For no lock longer than this, and not as long as Postgres takes to look for a deadlock: programs that use the table wait
-- behind a migration that waits.
SET LOCAL lock_timeout = '500ms';

-- name: has_migrations
-- Whether anything was ever migrated.
SELECT to_regclass('postroom.schema_migration') IS NOT NULL;

-- name: schema_version
-- The newest migration of a room that was applied.
SELECT coalesce(max(version), 0) FROM postroom.schema_migration WHERE room = $1;

-- name: record_migration
-- Remembers a migration, in the transaction that applied it.
INSERT INTO postroom.schema_migration (room, version, name) VALUES ($1, $2, $3);
