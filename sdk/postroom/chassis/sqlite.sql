-- What every SQLite file of Postroom is opened, migrated, written and checkpointed with.

-- name: begin
-- Take the write lock at once, so that it cannot be refused later in the transaction (docs/contract/send.md#send-36).
BEGIN IMMEDIATE;

-- name: commit
-- Make the transaction durable.
COMMIT;

-- name: rollback
-- Undo the transaction.
ROLLBACK;

-- name: begin_read
-- One snapshot for several reads.
BEGIN DEFERRED;

-- name: write_pragmas
-- How the one write connection behaves; journal_mode stays in the file.
PRAGMA busy_timeout = 5000;             -- ms
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;              -- an fsync per commit: what was answered is on disk
PRAGMA wal_autocheckpoint = 0;          -- the writer checkpoints after it has answered
PRAGMA journal_size_limit = 8388608;    -- bytes the WAL file shrinks to when it starts over
PRAGMA cache_size = -16384;             -- KiB
PRAGMA foreign_keys = ON;               -- no row without what it refers to
PRAGMA secure_delete = FAST;            -- what is deleted is overwritten where that adds no page to write
PRAGMA recursive_triggers = ON;         -- REPLACE is a DELETE, and fires its trigger
PRAGMA temp_store = MEMORY;

-- name: sync_later
-- What is written next need not be on disk when it is answered: a later commit takes it along.
PRAGMA synchronous = NORMAL;

-- name: sync
-- Every commit is on disk when it is answered.
PRAGMA synchronous = FULL;

-- name: read_pragmas
-- How a reader behaves.
PRAGMA busy_timeout = 5000;             -- ms
PRAGMA query_only = ON;
PRAGMA cache_size = -4096;              -- KiB
PRAGMA temp_store = MEMORY;

-- name: copy_pragmas
-- How a copy is written that is worth nothing until it is whole: no journal, no sync, and little memory.
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
PRAGMA cache_size = -1024;              -- KiB: what the last step of a copy still has to write

-- name: file_bytes
-- Bytes of the file, as its next checkpoint leaves it.
SELECT page_count * page_size FROM pragma_page_count, pragma_page_size;

-- name: user_version
-- The number of the last migration.
PRAGMA user_version;

-- name: application_id
-- Whose file this is: 0 for a new one.
PRAGMA application_id;

-- name: quick_check
-- Whether the file is sound: "ok", or the first fault.
PRAGMA quick_check(1);

-- name: used_bytes
-- Bytes of the file that hold something.
SELECT (page_count - freelist_count) * page_size
FROM pragma_page_count, pragma_freelist_count, pragma_page_size;

-- name: checkpoint
-- Move what no reader needs out of the WAL: busy, frames in it, frames moved.
PRAGMA wal_checkpoint(PASSIVE);

-- name: checkpoint_restart
-- The same, and wait for the readers, so that the WAL starts over.
PRAGMA wal_checkpoint(RESTART);

-- name: wait_briefly
-- How long a restart may wait for readers, in ms: all operations wait with it.
PRAGMA busy_timeout = 100;

-- name: wait
-- How long anything else may wait for a lock, in ms.
PRAGMA busy_timeout = 5000;

-- name: checkpoint_truncate
-- The same, and leave an empty WAL.
PRAGMA wal_checkpoint(TRUNCATE);
